// Operates the page of the MCP Inspector, with examples/over_http.py as server: inspector_page.mjs PAGE SCREENSHOT
// The browser can reach only the origin of this page.  The program uses the page like a person.
// CHROMIUM is the path of the browser.

import { chromium } from "playwright-core";
import { CHROMIUM_FLAGS } from "./chromium_flags.mjs";
import { tell } from "./report.mjs";

const [address, path] = process.argv.slice(2);
const BEATS = 20; // a tenth of a second each

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: CHROMIUM_FLAGS });
const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
const home = new URL(address).origin;
const asked = new Set();
await page.route("**/*", (route) => {
  const there = new URL(route.request().url());
  if (there.hostname === "127.0.0.1") asked.add(there.origin === home ? "itself" : there.origin);
  return there.origin === home ? route.continue() : route.abort(); // the page requests fonts from other sites
});

await page.goto(address);
await page.getByRole("switch", { name: "Connect or disconnect" }).locator("..").click();
await page.getByText("Connected", { exact: true }).waitFor();
tell("revision", (await page.getByText(/^MCP \d{4}-/).textContent()).replace("MCP ", ""));
tell("name", await page.getByRole("banner").getByRole("paragraph").textContent());

await page.getByRole("radio", { name: "Tools" }).locator("..").click();
const tool = page.getByRole("button", { name: "count", exact: true });
await tool.waitFor();
tell("tools", await page.getByRole("heading", { name: /^Tools/ }).textContent());
await tool.click();
await page.getByText("Wait for this number of beats.").waitFor();

// Each progress report changes the text of one notice.
await page.evaluate((beats) => {
  window.reported = [];
  const look = () => {
    const notice = document.body.innerText.match(new RegExp(`(\\d+) / ${beats} \\(\\d+%\\)`));
    if (notice && Number(notice[1]) !== window.reported.at(-1)) window.reported.push(Number(notice[1]));
  };
  new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
}, BEATS);
await page.getByRole("radio", { name: "Protocol" }).locator("..").click();
await page.getByRole("textbox", { name: "beats" }).fill(`${BEATS}`);
await page.getByRole("button", { name: "Execute Tool" }).click();
const result = page.getByText(/^\d+ beats$/);
await result.waitFor();
tell("result", await result.textContent());
const reported = await page.evaluate(() => window.reported);
tell("progress", reported.length > 1 && reported.every((each, index) => index === 0 || each > reported[index - 1]));
await page.screenshot({ path });

await page.getByRole("button", { name: "Disconnect from server" }).click();
await page.getByText("Disconnected", { exact: true }).waitFor();
tell("asked", [...asked]);
await browser.close();
tell("end", "clean");
