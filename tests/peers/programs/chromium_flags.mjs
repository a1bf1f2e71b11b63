// Flags that stop the background activity of Chromium.

export const CHROMIUM_FLAGS = [
  "--no-sandbox", // the sandbox does not work for root
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
