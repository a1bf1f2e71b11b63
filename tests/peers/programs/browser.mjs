// A page in a browser that connects to a server by itself: browser.mjs URL session|modern|sse|ws [behaviour ...]
// The program for the installed SDK is bundled into one script, without its imports of Node, and runs in an empty page.
// ORIGIN is the origin of the page.  The page is not loaded from the network, so the origin can be any address.
// CHROMIUM is the path of the browser.

import { existsSync } from "node:fs";
import { build } from "esbuild";
import { chromium } from "playwright-core";
import { CHROMIUM_FLAGS } from "./chromium_flags.mjs";

const { ORIGIN, CHROMIUM } = process.env;
const pathOf = (path) => new URL(path, import.meta.url).pathname;

// A page cannot start child processes, so it needs no stdio transport.
const withoutStdio = {
  name: "withoutStdio",
  setup(build) {
    build.onResolve({ filter: /\/stdio(\.js)?$/ }, ({ path }) => ({ path, namespace: "withoutStdio" }));
    build.onLoad({ filter: /.*/, namespace: "withoutStdio" }, () => ({ contents: "export const StdioClientTransport = null;" }));
  },
};
const { outputFiles } = await build({
  entryPoints: [pathOf(existsSync(pathOf("node_modules/@modelcontextprotocol/client")) ? "typescript2.mjs" : "typescript1.mjs")],
  bundle: true,
  format: "esm",
  write: false,
  logLevel: "error",
  plugins: [withoutStdio],
});

const browser = await chromium.launch({ executablePath: CHROMIUM, args: CHROMIUM_FLAGS });
// The user has to allow each page to ask servers of this machine.
const context = await browser.newContext({ permissions: ["local-network-access"] });
const page = await context.newPage();
await page.route(`${ORIGIN}/`, (route) => route.fulfill({ contentType: "text/html", body: "<!doctype html>" }));
await page.goto(ORIGIN);

let finish;
const finished = new Promise((resolve) => (finish = resolve));
page.on("pageerror", (error) => {
  process.stderr.write(`${error}\n`);
  finish(1);
});
page.on("console", (each) => each.type() === "error" && process.stderr.write(`${each.text()}\n`));
await page.exposeFunction("tell", (line) => {
  process.stdout.write(line);
  if (JSON.parse(line).behaviour === "end") finish(0);
});
await page.evaluate((argv) => {
  globalThis.process = { argv, stdout: { write: (line) => globalThis.tell(line) } };
}, process.argv);
await page.addScriptTag({ type: "module", content: outputFiles[0].text });
process.exitCode = await finished;
await browser.close();
