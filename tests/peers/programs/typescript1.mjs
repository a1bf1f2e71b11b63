// A client of the official TypeScript SDK 1.x: typescript1.mjs TARGET stdio|session|sse|ws [behaviour ...]
// The first releases support neither streamable HTTP nor elicitation, and expect the EventSource of browsers.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import * as types from "@modelcontextprotocol/sdk/types.js";
import { Received } from "./report.mjs";
import { answers, visit } from "./visit.mjs";

const [target, way, ...wanted] = process.argv.slice(2);

async function transportTo() {
  if (way === "stdio") {
    const { StdioClientTransport } = await import("@modelcontextprotocol/sdk/client/stdio.js");
    const [command, ...args] = JSON.parse(target);
    return new StdioClientTransport({ command, args });
  }
  const url = new URL(target);
  if (way === "ws") {
    const { WebSocketClientTransport } = await import("@modelcontextprotocol/sdk/client/websocket.js");
    return new WebSocketClientTransport(url);
  }
  if (way === "session") {
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    return new StreamableHTTPClientTransport(url);
  }
  const { EventSource, default: first } = await import("eventsource");
  globalThis.EventSource ??= EventSource ?? first;
  const { SSEClientTransport } = await import("@modelcontextprotocol/sdk/client/sse.js");
  return new SSEClientTransport(url);
}

const notifications = new Received();
const logs = new Received();
const client = new Client(
  { name: "visitor", version: "1" },
  { capabilities: { sampling: {}, roots: { listChanged: true }, ...(types.ElicitRequestSchema && { elicitation: {} }) } },
);
client.setRequestHandler(types.CreateMessageRequestSchema, ({ params }) => answers.sample(params));
if (types.ElicitRequestSchema) client.setRequestHandler(types.ElicitRequestSchema, answers.elicit);
client.setRequestHandler(types.ListRootsRequestSchema, answers.roots);
client.setNotificationHandler(types.LoggingMessageNotificationSchema, ({ params }) => {
  logs.add(`${params.level} ${params.logger} ${params.data.level}`);
});
for (const changed of [
  types.ResourceUpdatedNotificationSchema,
  types.ToolListChangedNotificationSchema,
  types.ResourceListChangedNotificationSchema,
  types.PromptListChangedNotificationSchema,
]) {
  client.setNotificationHandler(changed, (each) => notifications.add(each));
}

const transport = await transportTo();
const sdk = {
  call: (client, params, options) => client.callTool(params, undefined, options),
  subscribe: async (client, uri, touch) => {
    await client.subscribeResource({ uri });
    await touch();
    const update = await notifications.first((each) => each.method === "notifications/resources/updated");
    await client.unsubscribeResource({ uri });
    return update.params.uri;
  },
  listChanged: async (client, kind, toggle) => {
    await toggle();
    await notifications.first((each) => each.method === `notifications/${kind}/list_changed`);
  },
  logs: async (client, level, call) => {
    await client.setLoggingLevel(level);
    await call({});
    await logs.first((each) => each.startsWith("error "));
    return logs.seen;
  },
  close: async (client) => {
    if (way === "session") await transport.terminateSession();
    await client.close();
  },
};

let connected;
client.request = ((before) => async (request, ...more) => {
  const result = await before.call(client, request, ...more);
  // No release returns the revision to its program, and the first releases do not return the instructions.
  if (request.method === "initialize") connected = [result.protocolVersion, result.instructions];
  return result;
})(client.request);
await client.connect(transport);
await visit(client, sdk, connected, wanted);
