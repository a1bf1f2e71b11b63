// What keeps Chromium from doing anything that nobody asked it for.

export const QUIET = [
  "--no-sandbox", // which root cannot have
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
