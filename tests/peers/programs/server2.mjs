// The everything server with the official TypeScript SDK 2.x: server2.mjs stdio|session|sse
// It is an `McpServer`, created for each connection, or for each request of 2026-07-28 over HTTP.  Its requests to the
// client have the form of that revision; the SDK converts them for older revisions.  HTTP+SSE has a package of its own.

import { randomUUID } from "node:crypto";
import * as sdk from "@modelcontextprotocol/server";
import * as z from "zod";
import * as common from "./server_common.mjs";

const shown = { tools: false, resources: false, prompts: false };
const { inputRequired } = sdk;
// If each request has a server of its own, a subscription belongs to another server.  The bus connects them.
const bus = new sdk.InMemoryServerEventBus();

const registering = (server) => (name, inputSchema, run, more = {}) =>
  server.registerTool(name, { inputSchema: z.object(inputSchema), ...more }, run);

function addPlainTools(server) {
  const tool = registering(server);
  tool("test_simple_text", {}, () => common.textResult("This is a simple text response for testing."));
  tool("interop_echo", { text: z.string(), delay_ms: z.int().default(0) }, async ({ text, delay_ms }) => {
    await common.pause(delay_ms);
    return common.textResult(text);
  });
  tool(
    "interop_structured",
    { a: z.number(), b: z.number() },
    (args) => ({ ...common.textResult(JSON.stringify(common.sum(args))), structuredContent: common.sum(args) }),
    { outputSchema: z.object({ sum: z.number(), label: z.string() }) },
  );
  tool("test_error_handling", {}, () => {
    throw new Error("This tool intentionally returns an error for testing");
  });
  tool("interop_check", { count: z.int().min(1).max(10), label: z.string() }, ({ count, label }) =>
    common.textResult(`${label}x${count}`),
  );
}

function addNotifyingTools(server) {
  const tool = registering(server);
  const progress = ({ mcpReq }, progress, total) =>
    mcpReq.notify({
      method: "notifications/progress",
      params: { progressToken: mcpReq._meta.progressToken, progress, total },
    });
  tool("test_tool_with_progress", {}, async (_, context) => {
    for (const done of [0, 50, 100]) {
      await progress(context, done, 100);
      await common.pause(20);
    }
    return common.textResult("Progress was reported.");
  });
  tool("interop_wait", { seconds: z.number(), tag: z.string() }, async (args, context) => {
    const waited = common.wait(args, context.mcpReq.signal);
    await progress(context, 0, args.seconds);
    return waited;
  });
  tool("interop_cancelled", {}, () => common.textResult(JSON.stringify(common.cancelledTags)));
  tool("interop_log", {}, async (_, { mcpReq }) => {
    for (const level of common.LEVELS) await mcpReq.log(level, { level }, "interop");
    return common.textResult("logged");
  });
  tool("interop_touch", { uri: z.string() }, async ({ uri }) => {
    await server.server.sendResourceUpdated({ uri });
    bus.publish({ kind: "resource_updated", uri });
    return common.textResult("touched");
  });
}

function addToggle(server) {
  const tool = registering(server);
  const dynamic = {
    tools: tool("interop_dynamic", {}, () => common.textResult("there")),
    resources: server.registerResource("interop-dynamic", "test://interop-dynamic", {}, ({ href: uri }) => ({
      contents: [{ uri, ...common.DYNAMIC }],
    })),
    prompts: server.registerPrompt("interop_dynamic", {}, () => ({ messages: [] })),
  };
  for (const [kind, each] of Object.entries(dynamic)) each.enabled = shown[kind];
  tool("interop_toggle", { kind: z.enum(["tools", "resources", "prompts"]), on: z.boolean() }, ({ kind, on }) => {
    shown[kind] = on;
    dynamic[kind].update({ enabled: on });
    bus.publish({ kind: `${kind}_list_changed` });
    return common.textResult(on ? "on" : "off");
  });
}

function addAskingTools(server) {
  const tool = registering(server);
  // The SDK calls the tool again when it has the answer.
  const asking = (question, go) => (args, { mcpReq: { inputResponses } }) =>
    inputResponses ? go(inputResponses.answer) : inputRequired({ inputRequests: { answer: question(args) } });
  tool(
    "test_sampling",
    { prompt: z.string() },
    asking(
      ({ prompt }) =>
        inputRequired.createMessage({ messages: [common.user(common.text(prompt))], maxTokens: 100 }),
      ({ content }) => common.textResult(`LLM response: ${content.text}`),
    ),
  );
  tool(
    "test_elicitation",
    { message: z.string() },
    asking(({ message }) => inputRequired.elicit({ message, requestedSchema: common.REPLY }), common.elicitationResult),
  );
  tool(
    "interop_roots",
    {},
    asking(
      () => inputRequired.listRoots(),
      ({ roots }) => common.textResult(roots.map(({ uri }) => uri).join(",")),
    ),
  );
}

function addResources(server) {
  for (const [uri, content] of Object.entries(common.RESOURCES)) {
    server.registerResource(uri.slice(7), uri, { mimeType: content.mimeType }, () => ({
      contents: [{ uri, ...content }],
    }));
  }
  const complete = { id: (value) => common.completions("id", value) };
  const template = new sdk.ResourceTemplate(common.TEMPLATE, { list: undefined, complete });
  server.registerResource("item", template, { mimeType: "application/json" }, ({ href: uri }, { id }) => ({
    contents: [{ uri, ...common.item(id) }],
  }));
}

function addPrompts(server) {
  for (const [name, [args, messages]] of Object.entries(common.PROMPTS)) {
    const fields = args.map((each) => {
      const complete = (value, context) => common.completions(each, value, context);
      return [each, each === "resourceUri" ? z.string() : sdk.completable(z.string(), complete)];
    });
    const argsSchema = z.object(Object.fromEntries(fields));
    server.registerPrompt(name, { argsSchema }, (given) => ({ messages: messages(given) }));
  }
}

function makeServer() {
  const server = new sdk.McpServer(
    { name: "peer", version: "1" },
    { capabilities: { logging: {}, resources: { subscribe: true } }, instructions: "interop fixture" },
  );
  for (const add of [addPlainTools, addNotifyingTools, addToggle, addAskingTools, addResources, addPrompts]) add(server);
  for (const method of ["resources/subscribe", "resources/unsubscribe"]) {
    server.server.setRequestHandler(method, () => ({}));
  }
  return server;
}

async function overHttp() {
  const { NodeStreamableHTTPServerTransport, toNodeHandler, toWebRequest } = await import(
    "@modelcontextprotocol/node"
  );
  const modern = toNodeHandler(sdk.createMcpHandler(makeServer, { legacy: "reject", bus }));
  const sessions = new Map();
  common.listen(async (request, response) => {
    const asked = await toWebRequest(request);
    const body = asked.body ? await asked.clone().json() : undefined;
    if (!(await sdk.isLegacyRequest(asked, body))) return modern(request, response, body);
    let transport = sessions.get(request.headers["mcp-session-id"]);
    if (!transport) {
      transport = new NodeStreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        onsessioninitialized: (id) => sessions.set(id, transport),
      });
      await makeServer().connect(transport);
    }
    return transport.handleRequest(request, response, body);
  });
}

async function overSse() {
  const { SSEServerTransport } = await import("@modelcontextprotocol/server-legacy/sse");
  const sessions = new Map();
  common.listen(async (request, response, url) => {
    const opened = sessions.get(url.searchParams.get("sessionId"));
    if (opened) {
      await opened.handlePostMessage(request, response);
    } else if (request.method !== "GET") {
      response.writeHead(404).end();
    } else {
      const transport = new SSEServerTransport("/messages", response);
      sessions.set(transport.sessionId, transport);
      await makeServer().connect(transport);
    }
  });
}

async function overStdio() {
  const { serveStdio } = await import("@modelcontextprotocol/server/stdio");
  serveStdio(makeServer);
}

await { stdio: overStdio, session: overHttp, sse: overSse }[process.argv[2]]();
