// The everything server with the official TypeScript SDK 1.x: server1.mjs stdio|session|sse
// It is a `Server`, as in the first releases, and has a handler for each request.  Those releases do not support
// streamable HTTP, and cannot send a message on the stream of a call.

import { randomUUID } from "node:crypto";
import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import * as types from "@modelcontextprotocol/sdk/types.js";
import * as common from "./server_common.mjs";

const PAGE = 2;
const shown = { tools: false, resources: false, prompts: false };

function schema(types = {}) {
  const properties = Object.fromEntries(Object.entries(types).map(([name, type]) => [name, { type }]));
  return { type: "object", properties, required: Object.keys(types) };
}

// Each tool has the types of its arguments, its function, and perhaps its output schema.
const TOOLS = {
  test_simple_text: [{}, () => common.textResult("This is a simple text response for testing.")],
  interop_echo: [
    { text: "string", delay_ms: "integer" },
    async ({ text, delay_ms }) => {
      await common.pause(delay_ms);
      return common.textResult(text);
    },
  ],
  interop_structured: [
    { a: "number", b: "number" },
    (args) => ({ ...common.textResult(JSON.stringify(common.sum(args))), structuredContent: common.sum(args) }),
    schema({ sum: "number", label: "string" }),
  ],
  test_error_handling: [
    {},
    () => ({ ...common.textResult("This tool intentionally returns an error for testing"), isError: true }),
  ],
  interop_check: [
    { count: "integer", label: "string" },
    ({ count, label }) => {
      if (Number.isInteger(count)) return common.textResult(`${label}x${count}`);
      // 2025-11-25 asks for a result with isError, older revisions for an error.
      if (types.LATEST_PROTOCOL_VERSION >= "2025-11-25") return { ...common.textResult("no count"), isError: true };
      throw new types.McpError(types.ErrorCode.InvalidParams, "no count");
    },
  ],
  test_tool_with_progress: [
    {},
    async (_, { progress }) => {
      for (const done of [0, 50, 100]) {
        await progress(done, 100);
        await common.pause(20);
      }
      return common.textResult("Progress was reported.");
    },
  ],
  interop_wait: [
    { seconds: "number", tag: "string" },
    async (args, { progress, signal }) => {
      const waited = common.wait(args, signal);
      await progress(0, args.seconds);
      return waited;
    },
  ],
  interop_cancelled: [{}, () => common.textResult(JSON.stringify(common.cancelledTags))],
  interop_log: [
    {},
    async (_, { tell, connection }) => {
      for (const level of common.LEVELS.slice(common.LEVELS.indexOf(connection.level))) {
        await tell("notifications/message", { level, logger: "interop", data: { level } });
      }
      return common.textResult("logged");
    },
  ],
  interop_touch: [
    { uri: "string" },
    async ({ uri }, { server, connection }) => {
      if (connection.subscribed.has(uri)) await server.sendResourceUpdated({ uri });
      return common.textResult("touched");
    },
  ],
  interop_toggle: [
    { kind: "string", on: "boolean" },
    async ({ kind, on }, { server }) => {
      shown[kind] = on;
      await server.notification({ method: `notifications/${kind}/list_changed` });
      return common.textResult(on ? "on" : "off");
    },
  ],
  test_sampling: [
    { prompt: "string" },
    async ({ prompt }, { ask }) => {
      const params = { messages: [common.user(common.text(prompt))], maxTokens: 100 };
      const { content } = await ask("sampling/createMessage", params, types.CreateMessageResultSchema);
      return common.textResult(`LLM response: ${content.text}`);
    },
  ],
  test_elicitation: [
    { message: "string" },
    async ({ message }, { ask }) => {
      const params = { message, requestedSchema: common.REPLY };
      return common.elicitationResult(await ask("elicitation/create", params, types.ElicitResultSchema));
    },
  ],
  interop_roots: [
    {},
    async (_, { ask }) => {
      const { roots } = await ask("roots/list", {}, types.ListRootsResultSchema);
      return common.textResult(roots.map(({ uri }) => uri).join(","));
    },
  ],
};

function page(kind, all, cursor) {
  const start = Number(cursor ?? 0);
  const end = start + PAGE;
  return { [kind]: all.slice(start, end), ...(end < all.length && { nextCursor: `${end}` }) };
}

function tools() {
  const named = Object.entries(TOOLS).map(([name, [args, , outputSchema]]) => ({
    name,
    inputSchema: schema(args),
    ...(outputSchema && { outputSchema }),
  }));
  return shown.tools ? [...named, { name: "interop_dynamic", inputSchema: schema() }] : named;
}

function resources() {
  const all = { ...common.RESOURCES, ...(shown.resources && { "test://interop-dynamic": common.DYNAMIC }) };
  return Object.entries(all).map(([uri, { mimeType }]) => ({ uri, name: uri.slice(7), mimeType }));
}

function prompts() {
  const named = Object.entries(common.PROMPTS).map(([name, [args]]) => ({
    name,
    arguments: args.map((each) => ({ name: each, required: true })),
  }));
  return shown.prompts ? [...named, { name: "interop_dynamic" }] : named;
}

function contents(uri) {
  const id = /^test:\/\/template\/(.*)\/data$/.exec(uri)?.[1];
  const found = id ? common.item(id) : common.RESOURCES[uri];
  if (!found) throw new types.McpError(-32002, `there is no ${uri}`);
  return { contents: [{ uri, ...found }] };
}

function prompt({ name, arguments: args }) {
  if (!(name in common.PROMPTS)) throw new types.McpError(types.ErrorCode.InvalidParams, `there is no ${name}`);
  return { messages: common.PROMPTS[name][1](args) };
}

// The second argument of a tool: its server, the state of the connection, and functions that send messages to the client.
function contextOf(server, connection, meta, extra) {
  const send = extra.sendNotification ?? ((notification) => server.notification(notification));
  const request = extra.sendRequest ?? ((asked, result) => server.request(asked, result));
  const tell = (method, params) => send({ method, params });
  const { progressToken } = meta ?? {};
  return {
    server,
    connection,
    signal: extra.signal,
    tell,
    progress: (progress, total) => tell("notifications/progress", { progressToken, progress, total }),
    ask: (method, params, result) => request({ method, params }, result),
  };
}

function handleContent(server) {
  const templates = [{ uriTemplate: common.TEMPLATE, name: "item", mimeType: "application/json" }];
  const lists = [
    ["tools", types.ListToolsRequestSchema, tools],
    ["resources", types.ListResourcesRequestSchema, resources],
    ["prompts", types.ListPromptsRequestSchema, prompts],
  ];
  for (const [kind, schema, all] of lists) {
    server.setRequestHandler(schema, ({ params }) => page(kind, all(), params?.cursor));
  }
  server.setRequestHandler(types.ListResourceTemplatesRequestSchema, () => ({ resourceTemplates: templates }));
  server.setRequestHandler(types.ReadResourceRequestSchema, ({ params }) => contents(params.uri));
  server.setRequestHandler(types.GetPromptRequestSchema, ({ params }) => prompt(params));
  server.setRequestHandler(types.CompleteRequestSchema, ({ params: { argument, context } }) => ({
    completion: { values: common.completions(argument.name, argument.value, context) },
  }));
}

function handleConnection(server) {
  const connection = { level: "debug", subscribed: new Set() };
  server.setRequestHandler(types.CallToolRequestSchema, ({ params: { name, arguments: args, _meta } }, extra) => {
    if (!(name in TOOLS)) throw new types.McpError(types.ErrorCode.InvalidParams, `there is no ${name}`);
    return TOOLS[name][1](args ?? {}, contextOf(server, connection, _meta, extra));
  });
  server.setRequestHandler(types.SubscribeRequestSchema, ({ params }) => {
    connection.subscribed.add(params.uri);
    return {};
  });
  server.setRequestHandler(types.UnsubscribeRequestSchema, ({ params }) => {
    connection.subscribed.delete(params.uri);
    return {};
  });
  server.setRequestHandler(types.SetLevelRequestSchema, ({ params }) => {
    connection.level = params.level;
    return {};
  });
}

// Each connection has a server of its own.
function makeServer() {
  const lists = { listChanged: true };
  const resources = { ...lists, subscribe: true };
  const capabilities = { tools: lists, resources, prompts: lists, logging: {}, completions: {} };
  const server = new Server({ name: "peer", version: "1" }, { capabilities, instructions: "interop fixture" });
  handleContent(server);
  handleConnection(server);
  return server;
}

async function overHttp() {
  const { StreamableHTTPServerTransport } = await import("@modelcontextprotocol/sdk/server/streamableHttp.js");
  const sessions = new Map();
  common.listen(async (request, response) => {
    let transport = sessions.get(request.headers["mcp-session-id"]);
    if (!transport) {
      transport = new StreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        onsessioninitialized: (id) => sessions.set(id, transport),
      });
      await makeServer().connect(transport);
    }
    await transport.handleRequest(request, response);
  });
}

async function overSse() {
  const { SSEServerTransport } = await import("@modelcontextprotocol/sdk/server/sse.js");
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
  const { StdioServerTransport } = await import("@modelcontextprotocol/sdk/server/stdio.js");
  await makeServer().connect(new StdioServerTransport());
}

await { stdio: overStdio, session: overHttp, sse: overSse }[process.argv[2]]();
