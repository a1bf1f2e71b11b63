// What is looked at by the programs for both TypeScript SDKs, whose clients differ in how they are made, in where options
// go, and in how they subscribe: `client` is theirs, `sdk` what differs.

import { LARGE, ODD, STEPS, refused, reporter, tell } from "./report.mjs";

export const answers = {
  sample: (params) => ({
    role: "assistant",
    content: { type: "text", text: `a model was told ${[params.messages[0].content].flat()[0].text}` },
    model: "none",
    stopReason: "endTurn",
  }),
  elicit: () => ({ action: "accept", content: { name: "Ada", age: 36 } }),
  roots: () => ({ roots: [{ uri: "file:///srv/a", name: "a" }, { uri: "file:///srv/b" }] }),
};

export async function visit(client, sdk, revision, wanted) {
  const look = reporter(wanted);
  const tool = (name, args = {}, options = {}) => sdk.call(client, { name, arguments: args }, options);
  const call = async (name, args) => (await tool(name, args)).content[0].text;

  tell("connect", [revision, client.getServerVersion()?.name ?? null]);
  await look("list", async () => ({
    tools: (await client.listTools()).tools.map((each) => each.name).sort(),
    prompts: (await client.listPrompts()).prompts.map((each) => each.name).sort(),
    resources: (await client.listResources()).resources.map((each) => each.uri).sort(),
    templates: (await client.listResourceTemplates()).resourceTemplates.map((each) => each.uriTemplate),
  }));
  await look("call", async () => (await call("echo", { text: ODD })) === ODD);
  await look("structured result", async () => (await tool("add", { a: 2, b: 3 })).structuredContent);
  await look("error result", async () => {
    const result = await tool("fail");
    return [result.isError, result.content[0].text];
  });
  await look("unknown tool", () => refused(tool("nobody")));
  await look("bad arguments", async () => (await tool("add", { a: "two", b: 3 })).isError);
  await look("progress", async () => {
    const seen = [];
    const onprogress = ({ progress, total, message }) => seen.push([progress, total ?? null, message ?? null]);
    const result = await tool("slow", { steps: STEPS }, { onprogress });
    return [seen, result.content[0].text];
  });
  await look("cancel", async () => {
    const abort = new AbortController();
    const outcome = tool("wait", { tag: "cancel" }, { signal: abort.signal, onprogress: () => abort.abort("enough") });
    await outcome.then(() => Promise.reject(new Error("it was answered")), () => undefined);
    return await call("gone", { tag: "cancel" });
  });
  await look("read", async () => {
    const text = (await client.readResource({ uri: "peers://greeting" })).contents[0];
    const blob = (await client.readResource({ uri: "peers://picture" })).contents[0];
    const item = (await client.readResource({ uri: "peers://item/7" })).contents[0];
    return [text.text, blob.mimeType, blob.blob, item.text];
  });
  await look("unknown resource", () => refused(client.readResource({ uri: "peers://nothing" })));
  await look("subscribe", () => sdk.subscribe(client, () => call("touch", { uri: "peers://greeting" })));
  await look("list changed", async () => {
    await sdk.listChanged(client, () => call("toggle", { on: true }));
    const names = (await client.listTools()).tools.map((each) => each.name);
    await call("toggle", { on: false });
    return names.includes("extra");
  });
  await look("prompt", async () => {
    const { messages } = await client.getPrompt({ name: "compare", arguments: { first: "Oslo", second: "Rome" } });
    return [messages[0].role, messages[0].content.text];
  });
  await look("unknown prompt", () => refused(client.getPrompt({ name: "nobody" })));
  await look("completion", async () => {
    const ref = { type: "ref/prompt", name: "compare" };
    return (await client.complete({ ref, argument: { name: "first", value: "O" } })).completion.values;
  });
  await look("logging", () => sdk.logs(client, (params) => sdk.call(client, { name: "log", arguments: {}, ...params })));
  await look("sampling", () => call("sample"));
  await look("elicitation", () => call("ask"));
  await look("roots", () => call("roots"));
  await look("large", async () => (await call("echo", { text: LARGE })) === LARGE);
  await look("parallel", async () => {
    const numbers = [...Array(20).keys()];
    const same = await Promise.all(
      numbers.map(async (each) => (await call("echo", { text: `number ${each}`, seconds: 0.2 })) === `number ${each}`),
    );
    return same.filter(Boolean).length;
  });
  await sdk.close(client);
  tell("end", "clean");
}
