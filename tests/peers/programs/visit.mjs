// The behaviours that the programs for all TypeScript SDKs try; behaviours.py describes the results.  `client` is the
// client of the SDK.  `sdk` has the functions that differ between SDKs: calls with options, subscriptions, and closing.

import { LARGE, Received, ODD, allowSlowExit, refused, reporter, tell } from "./report.mjs";

const WATCHED = "test://watched-resource";
const KINDS = {
  tools: { list: (client, params) => client.listTools(params), name: (each) => each.name },
  resources: { list: (client, params) => client.listResources(params), name: (each) => each.uri },
  templates: { list: (client, params) => client.listResourceTemplates(params), name: (each) => each.uriTemplate },
  prompts: { list: (client, params) => client.listPrompts(params), name: (each) => each.name },
};
const DYNAMIC = { tools: "interop_dynamic", resources: "test://interop-dynamic", prompts: "interop_dynamic" };

export const answers = {
  sample: (params) => ({
    role: "assistant",
    content: { type: "text", text: `a model was told ${[params.messages[0].content].flat()[0].text}` },
    model: "none",
    stopReason: "endTurn",
  }),
  elicit: () => ({ action: "accept", content: { response: "blue" } }),
  roots: () => ({ roots: [{ uri: "file:///srv/a", name: "a" }, { uri: "file:///srv/b" }] }),
};

// All names of a kind, and the number of pages.
async function listed(client, kind) {
  const names = [];
  let pages = 0;
  let cursor;
  do {
    const page = await KINDS[kind].list(client, cursor === undefined ? undefined : { cursor });
    names.push(...(page[kind] ?? page.resourceTemplates).map(KINDS[kind].name));
    cursor = page.nextCursor;
    pages += 1;
  } while (cursor !== undefined);
  return [names, pages];
}

export async function visit(client, sdk, connected, wanted) {
  const look = reporter(wanted);
  const tool = (name, args = {}, options = {}) => sdk.call(client, { name, arguments: args }, options);
  const call = async (name, args) => (await tool(name, args)).content[0].text;

  // An error is printed, for example a response without a request.  Aborted streams are ignored: some seconds after a
  // cancelled call the client tries to resume the stream of that call, with the signal that was aborted.
  const expected = /AbortError|This operation was aborted|Maximum reconnection attempts/;
  client.onerror = (error) => expected.test(error) || console.error(`${error}`);
  tell("connect", connected);
  await look("list", async () => {
    const lists = {};
    const paged = [];
    for (const kind of Object.keys(KINDS)) {
      const [names, pages] = await listed(client, kind);
      lists[kind] = names.sort();
      if (pages > 1 || (await sdk.hasMore?.(client, kind))) paged.push(kind);
    }
    return { ...lists, paged: paged.sort() };
  });
  await look("call", async () => (await call("interop_echo", { text: ODD })) === ODD);
  await look("structured", async () => {
    const result = await tool("interop_structured", { a: 2, b: 3 });
    return [result.structuredContent ?? null, JSON.parse(result.content[0].text)];
  });
  await look("tool error", async () => {
    const result = await tool("test_error_handling");
    return [result.isError, result.content[0].text];
  });
  await look("unknown tool", () => refused(tool("interop_nothing")));
  await look("bad arguments", () => refused(tool("interop_check", { count: "two", label: "x" })));
  await look("progress", async () => {
    const reports = new Received();
    const result = tool("interop_progress", {}, { onprogress: ({ progress, total }) => reports.add([progress, total]) });
    await reports.first(() => reports.seen.length === 3);
    await call("interop_heard");
    await result;
    return reports.seen;
  });
  await look("cancel", async () => {
    const abort = new AbortController();
    const options = { signal: abort.signal, onprogress: () => abort.abort("enough") };
    await tool("interop_wait", { seconds: 60, tag: "cancel" }, options).then(
      () => Promise.reject(new Error("it was answered")),
      () => undefined,
    );
    while (!JSON.parse(await call("interop_cancelled")).includes("cancel"));
    return true;
  });
  await look("read", async () => {
    const read = async (uri) => (await client.readResource({ uri })).contents[0];
    const text = (await read("test://static-text")).text;
    const picture = await read("test://static-binary");
    return [text, picture.mimeType, JSON.parse((await read("test://template/7/data")).text)];
  });
  await look("unknown resource", () => refused(client.readResource({ uri: "test://no-such-resource" })));
  await look("subscribe", () => sdk.subscribe(client, WATCHED, () => call("interop_touch", { uri: WATCHED })));
  await look("list changed", async () => {
    const seen = [];
    for (const [kind, dynamic] of Object.entries(DYNAMIC)) {
      await sdk.listChanged(client, kind, () => call("interop_toggle", { kind, on: true }));
      const [names] = await listed(client, kind);
      if (names.includes(dynamic)) seen.push(kind);
      await call("interop_toggle", { kind, on: false });
    }
    return seen;
  });
  await look("prompts", async () => {
    const contents = async (name, args) =>
      (await client.getPrompt({ name, arguments: args })).messages.map((each) => each.content);
    const types = async (name, args) => (await contents(name, args)).map((each) => each.type);
    return [
      (await contents("test_simple_prompt"))[0].text,
      (await contents("test_prompt_with_arguments", { arg1: "a", arg2: "b" }))[0].text,
      await types("test_prompt_with_embedded_resource", { resourceUri: "test://example" }),
      await types("test_prompt_with_image"),
    ];
  });
  await look("unknown prompt", () => refused(client.getPrompt({ name: "interop_nothing" })));
  await look("completion", async () => {
    const prompt = { type: "ref/prompt", name: "test_prompt_with_arguments" };
    const template = { type: "ref/resource", uri: "test://template/{id}/data" };
    const context = connected[0] < "2025-06-18" ? {} : { context: { arguments: { arg1: "v" } } };
    const values = async (params) => (await client.complete(params)).completion.values;
    return [
      await values({ ref: prompt, argument: { name: "arg1", value: "alp" } }),
      await values({ ref: prompt, argument: { name: "arg2", value: "" }, ...context }),
      await values({ ref: template, argument: { name: "id", value: "1" } }),
    ];
  });
  await look("logging", () => sdk.logs(client, "notice", (params) => sdk.call(client, { name: "interop_log", ...params })));
  await look("sampling", () => call("test_sampling", { prompt: "a joke" }));
  await look("elicitation", () => call("test_elicitation", { message: "Which colour?" }));
  await look("roots", () => call("interop_roots"));
  await look("1 MB", async () => (await call("interop_echo", { text: LARGE })) === LARGE);
  await look("20 at once", async () => {
    const texts = [...Array(20).keys()].map((each) => `number ${each}`);
    const echoed = await Promise.all(texts.map((text) => call("interop_echo", { text, delay_ms: 200 })));
    return texts.filter((text, index) => echoed[index] === text).length;
  });
  allowSlowExit();
  await sdk.close(client);
  tell("end", "clean");
}
