// Clients on stdio that reach a server over HTTP through mcp-remote: mcp_remote.mjs URL session|modern|sse [behaviour ...]
// The clients are those of the official TypeScript SDKs.  mcp-remote forwards their messages in all revisions.

const [url, way, ...wanted] = process.argv.slice(2);
const proxy = new URL("node_modules/mcp-remote/dist/proxy.js", import.meta.url).pathname;
const config = new URL("config", import.meta.url).pathname; // the folder for its state; the default is in the home of the user
const strategy = way === "sse" ? "sse-only" : "http-only";
const environment = ["env", `MCP_REMOTE_CONFIG_DIR=${config}`];
const command = JSON.stringify([...environment, process.execPath, proxy, url, "--silent", "--transport", strategy]);
process.argv.splice(
  2,
  Infinity,
  command,
  ...(way === "modern" ? ["stdio-modern", "-cancel", ...wanted] : ["stdio", ...wanted]),
);
await import(way === "modern" ? "./typescript2.mjs" : "./typescript1.mjs");
