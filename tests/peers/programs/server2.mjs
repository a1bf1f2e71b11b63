// The server with one of everything by the official TypeScript SDK 2.x: server2.mjs stdio|session|sse
// It is an `McpServer`, made anew for each connection, or for each request of 2026-07-28 over HTTP; what it asks the
// client is written as that revision has it, and put to older ones by the SDK.  HTTP+SSE has a package of its own.

import { randomUUID } from "node:crypto";
import * as sdk from "@modelcontextprotocol/server";
import * as z from "zod";
import * as offered from "./offered.mjs";

const shown = { tools: false, resources: false, prompts: false };
const { inputRequired } = sdk;
// Where a server is made for each request, it is not the one that others listen to.
const bus = new sdk.InMemoryServerEventBus();

const registering = (server) => (name, inputSchema, run, more = {}) =>
  server.registerTool(name, { inputSchema: z.object(inputSchema), ...more }, run);

function addPlainTools(server) {
  const tool = registering(server);
  tool("test_simple_text", {}, () => offered.said("This is a simple text response for testing."));
  tool("interop_echo", { text: z.string(), delay_ms: z.int().default(0) }, async ({ text, delay_ms }) => {
    await offered.pause(delay_ms);
    return offered.said(text);
  });
  tool(
    "interop_structured",
    { a: z.number(), b: z.number() },
    (args) => ({ ...offered.said(JSON.stringify(offered.sum(args))), structuredContent: offered.sum(args) }),
    { outputSchema: z.object({ sum: z.number(), label: z.string() }) },
  );
  tool("test_error_handling", {}, () => {
    throw new Error("This tool intentionally returns an error for testing");
  });
  tool("interop_check", { count: z.int().min(1).max(10), label: z.string() }, ({ count, label }) =>
    offered.said(`${label}x${count}`),
  );
}

function addTellingTools(server) {
  const tool = registering(server);
  const progress = ({ mcpReq }, progress, total) =>
    mcpReq.notify({
      method: "notifications/progress",
      params: { progressToken: mcpReq._meta.progressToken, progress, total },
    });
  tool("test_tool_with_progress", {}, async (_, context) => {
    for (const done of [0, 50, 100]) {
      await progress(context, done, 100);
      await offered.pause(20);
    }
    return offered.said("Progress was reported.");
  });
  tool("interop_wait", { seconds: z.number(), tag: z.string() }, async (args, context) => {
    const waited = offered.wait(args, context.mcpReq.signal);
    await progress(context, 0, args.seconds);
    return waited;
  });
  tool("interop_cancelled", {}, () => offered.said(JSON.stringify(offered.left)));
  tool("interop_log", {}, async (_, { mcpReq }) => {
    for (const level of offered.LEVELS) await mcpReq.log(level, { level }, "interop");
    return offered.said("logged");
  });
  tool("interop_touch", { uri: z.string() }, async ({ uri }) => {
    await server.server.sendResourceUpdated({ uri });
    bus.publish({ kind: "resource_updated", uri });
    return offered.said("touched");
  });
}

function addToggle(server) {
  const tool = registering(server);
  const dynamic = {
    tools: tool("interop_dynamic", {}, () => offered.said("there")),
    resources: server.registerResource("interop-dynamic", "test://interop-dynamic", {}, ({ href: uri }) => ({
      contents: [{ uri, ...offered.DYNAMIC }],
    })),
    prompts: server.registerPrompt("interop_dynamic", {}, () => ({ messages: [] })),
  };
  for (const [kind, each] of Object.entries(dynamic)) each.enabled = shown[kind];
  tool("interop_toggle", { kind: z.enum(["tools", "resources", "prompts"]), on: z.boolean() }, ({ kind, on }) => {
    shown[kind] = on;
    dynamic[kind].update({ enabled: on });
    bus.publish({ kind: `${kind}_list_changed` });
    return offered.said(on ? "on" : "off");
  });
}

function addAskingTools(server) {
  const tool = registering(server);
  // Called again with the answer, when there is one.
  const asking = (question, go) => (args, { mcpReq: { inputResponses } }) =>
    inputResponses ? go(inputResponses.answer) : inputRequired({ inputRequests: { answer: question(args) } });
  tool(
    "test_sampling",
    { prompt: z.string() },
    asking(
      ({ prompt }) =>
        inputRequired.createMessage({ messages: [offered.user(offered.text(prompt))], maxTokens: 100 }),
      ({ content }) => offered.said(`LLM response: ${content.text}`),
    ),
  );
  tool(
    "test_elicitation",
    { message: z.string() },
    asking(({ message }) => inputRequired.elicit({ message, requestedSchema: offered.REPLY }), offered.told),
  );
  tool(
    "interop_roots",
    {},
    asking(
      () => inputRequired.listRoots(),
      ({ roots }) => offered.said(roots.map(({ uri }) => uri).join(",")),
    ),
  );
}

function addResources(server) {
  for (const [uri, content] of Object.entries(offered.RESOURCES)) {
    server.registerResource(uri.slice(7), uri, { mimeType: content.mimeType }, () => ({
      contents: [{ uri, ...content }],
    }));
  }
  const complete = { id: (value) => offered.completed("id", value) };
  const template = new sdk.ResourceTemplate(offered.TEMPLATE, { list: undefined, complete });
  server.registerResource("item", template, { mimeType: "application/json" }, ({ href: uri }, { id }) => ({
    contents: [{ uri, ...offered.item(id) }],
  }));
}

function addPrompts(server) {
  for (const [name, [args, messages]] of Object.entries(offered.PROMPTS)) {
    const fields = args.map((each) => {
      const complete = (value, context) => offered.completed(each, value, context);
      return [each, each === "resourceUri" ? z.string() : sdk.completable(z.string(), complete)];
    });
    const argsSchema = z.object(Object.fromEntries(fields));
    server.registerPrompt(name, { argsSchema }, (given) => ({ messages: messages(given) }));
  }
}

function made() {
  const server = new sdk.McpServer(
    { name: "peer", version: "1" },
    { capabilities: { logging: {}, resources: { subscribe: true } }, instructions: "interop fixture" },
  );
  for (const add of [addPlainTools, addTellingTools, addToggle, addAskingTools, addResources, addPrompts]) add(server);
  for (const method of ["resources/subscribe", "resources/unsubscribe"]) {
    server.server.setRequestHandler(method, () => ({}));
  }
  return server;
}

async function bySession() {
  const { NodeStreamableHTTPServerTransport, toNodeHandler, toWebRequest } = await import(
    "@modelcontextprotocol/node"
  );
  const modern = toNodeHandler(sdk.createMcpHandler(made, { legacy: "reject", bus }));
  const sessions = new Map();
  offered.listen(async (request, response) => {
    const asked = await toWebRequest(request);
    const body = asked.body ? await asked.clone().json() : undefined;
    if (!(await sdk.isLegacyRequest(asked, body))) return modern(request, response, body);
    let transport = sessions.get(request.headers["mcp-session-id"]);
    if (!transport) {
      transport = new NodeStreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        onsessioninitialized: (id) => sessions.set(id, transport),
      });
      await made().connect(transport);
    }
    return transport.handleRequest(request, response, body);
  });
}

async function bySse() {
  const { SSEServerTransport } = await import("@modelcontextprotocol/server-legacy/sse");
  const sessions = new Map();
  offered.listen(async (request, response, url) => {
    const opened = sessions.get(url.searchParams.get("sessionId"));
    if (opened) {
      await opened.handlePostMessage(request, response);
    } else if (request.method !== "GET") {
      response.writeHead(404).end();
    } else {
      const transport = new SSEServerTransport("/messages", response);
      sessions.set(transport.sessionId, transport);
      await made().connect(transport);
    }
  });
}

async function byPipe() {
  const { serveStdio } = await import("@modelcontextprotocol/server/stdio");
  serveStdio(made);
}

await { stdio: byPipe, session: bySession, sse: bySse }[process.argv[2]]();
