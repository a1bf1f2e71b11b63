// What a page in a browser sees of a server that it asks by itself: browser.mjs URL session|modern|sse|ws [behaviour ...]
// The program for the SDK that is installed is made one script, with what it has of node replaced, and runs in an empty
// page.  ORIGIN is where that comes from: the browser asks nobody for it, so it can be any address.  CHROMIUM is the
// browser's program.

import { existsSync } from "node:fs";
import { build } from "esbuild";
import { chromium } from "playwright-core";
import { QUIET } from "./quiet.mjs";

const { ORIGIN, CHROMIUM } = process.env;
const beside = (path) => new URL(path, import.meta.url).pathname;

// A page has no child processes.
const pipeless = {
  name: "pipeless",
  setup(build) {
    build.onResolve({ filter: /\/stdio(\.js)?$/ }, ({ path }) => ({ path, namespace: "pipeless" }));
    build.onLoad({ filter: /.*/, namespace: "pipeless" }, () => ({ contents: "export const StdioClientTransport = null;" }));
  },
};
const { outputFiles } = await build({
  entryPoints: [beside(existsSync(beside("node_modules/@modelcontextprotocol/client")) ? "typescript2.mjs" : "typescript1.mjs")],
  bundle: true,
  format: "esm",
  write: false,
  logLevel: "error",
  plugins: [pipeless],
});

const browser = await chromium.launch({ executablePath: CHROMIUM, args: QUIET });
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
