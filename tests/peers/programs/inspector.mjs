// The command line of the MCP Inspector as a client:
// inspector.mjs TARGET stdio|stdio-modern|session|modern|sse [behaviour ...]
// Each request is a command of its own, which connects, sends it and exits.  It does not support all behaviours.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { text } from "node:stream/consumers";
import { ODD, refused, reporter, tell } from "./report.mjs";

const [target, way, ...wanted] = process.argv.slice(2);
const launcher = new URL("node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js", import.meta.url);
const home = new URL("home", import.meta.url).pathname; // the folder for its files, instead of the home of the user

const server = way.startsWith("stdio")
  ? ["--transport", "stdio", ...JSON.parse(target)]
  : ["--transport", way === "sse" ? "sse" : "http", "--server-url", target];
const era = way.endsWith("modern") ? "modern" : "legacy";

// Returns the result that the command prints, or throws the error that it prints.
async function ask(method, ...more) {
  const options = ["--protocol-era", era, "--format", "json", "--quiet", "--method", method, ...more];
  const child = spawn(process.execPath, [launcher.pathname, "--cli", ...options, ...server], {
    env: { ...process.env, HOME: home },
    stdio: ["ignore", "pipe", "pipe"],
  });
  const [printed, stderr] = await Promise.all([text(child.stdout), text(child.stderr), once(child, "close")]);
  if (printed) return JSON.parse(printed).result;
  let error;
  try {
    ({ error } = JSON.parse(stderr));
  } catch {
    throw new Error(stderr);
  }
  throw Object.assign(new Error(error.message), { code: error.code });
}

const look = reporter(wanted);
const call = (name, args = {}, ...more) =>
  ask("tools/call", "--tool-name", name, "--tool-args-json", JSON.stringify(args), ...more);
const textOf = (call) => call.then((result) => result.content[0].text, (error) => error.message);

const { protocolVersion, instructions } = await ask("initialize");
tell("connect", [protocolVersion, instructions]);
await look("list", async () => {
  const methods = ["tools/list", "resources/list", "resources/templates/list", "prompts/list"];
  const [{ tools }, { resources }, { resourceTemplates }, { prompts }] = await Promise.all(methods.map((each) => ask(each)));
  return {
    tools: tools.map((each) => each.name).sort(),
    resources: resources.map((each) => each.uri).sort(),
    templates: resourceTemplates.map((each) => each.uriTemplate).sort(),
    prompts: prompts.map((each) => each.name).sort(),
    paged: [], // it does not show the pages
  };
});
await look("call", async () => (await textOf(call("interop_echo", { text: ODD }))) === ODD);
await look("structured", async () => {
  const result = await call("interop_structured", { a: 2, b: 3 });
  return [result.structuredContent ?? null, JSON.parse(result.content[0].text)];
});
await look("tool error", async () => {
  const result = await call("test_error_handling");
  return [result.isError, result.content[0].text];
});
await look("unknown tool", () => refused(call("interop_nothing")));
await look("bad arguments", () => refused(call("interop_check", { count: "two", label: "x" })));
await look("read", async () => {
  const uris = ["test://static-text", "test://static-binary", "test://template/7/data"];
  const results = await Promise.all(uris.map((each) => ask("resources/read", "--uri", each)));
  const [words, picture, item] = results.map((each) => each.contents[0]);
  return [words.text, picture.mimeType, JSON.parse(item.text)];
});
await look("unknown resource", () => refused(ask("resources/read", "--uri", "test://no-such-resource")));
await look("prompts", async () => {
  const prompt = async (name, ...args) => {
    const result = await ask("prompts/get", "--prompt-name", name, ...(args.length ? ["--prompt-args", ...args] : []));
    return result.messages.map((each) => each.content);
  };
  const [simple, repeated, resource, picture] = await Promise.all([
    prompt("test_simple_prompt"),
    prompt("test_prompt_with_arguments", "arg1=a", "arg2=b"),
    prompt("test_prompt_with_embedded_resource", "resourceUri=test://example"),
    prompt("test_prompt_with_image"),
  ]);
  return [simple[0].text, repeated[0].text, resource.map((each) => each.type), picture.map((each) => each.type)];
});
await look("unknown prompt", () => refused(ask("prompts/get", "--prompt-name", "interop_nothing")));
await look("sampling", () => textOf(call("test_sampling", { prompt: "a joke" })));
await look("elicitation", () => textOf(call("test_elicitation", { message: "Which colour?" })));
await look("roots", () => textOf(call("interop_roots")));
await look("20 at once", async () => {
  const load = ["--load", "--load-concurrency", "20", "--load-requests", "20"];
  return (await call("interop_echo", { text: "a number", delay_ms: 200 }, ...load)).ok; // it shows no texts
});
tell("end", "clean");
