// What the official TypeScript SDK 1.x sees of a server: typescript1.mjs URL session|sse [behaviour ...]

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { SSEClientTransport } from "@modelcontextprotocol/sdk/client/sse.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import * as types from "@modelcontextprotocol/sdk/types.js";
import { Latest } from "./report.mjs";
import { answers, visit } from "./visit.mjs";

const [url, way, ...wanted] = process.argv.slice(2);
const told = new Latest();
const logs = [];
const client = new Client(
  { name: "visitor", version: "1" },
  { capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } } },
);
client.setRequestHandler(types.CreateMessageRequestSchema, ({ params }) => answers.sample(params));
client.setRequestHandler(types.ElicitRequestSchema, answers.elicit);
client.setRequestHandler(types.ListRootsRequestSchema, answers.roots);
client.setNotificationHandler(types.LoggingMessageNotificationSchema, ({ params }) => {
  logs.push(`${params.level} ${params.data}`);
});
client.setNotificationHandler(types.ResourceUpdatedNotificationSchema, (each) => told.add(each));
client.setNotificationHandler(types.ToolListChangedNotificationSchema, (each) => told.add(each));

const transport = way === "sse" ? new SSEClientTransport(new URL(url)) : new StreamableHTTPClientTransport(new URL(url));
const sdk = {
  call: (client, params, options) => client.callTool(params, undefined, options),
  subscribe: async (client, touch) => {
    await client.subscribeResource({ uri: "peers://greeting" });
    await touch();
    const update = await told.some((each) => each.method === "notifications/resources/updated");
    await client.unsubscribeResource({ uri: "peers://greeting" });
    return update.params.uri;
  },
  listChanged: async (client, toggle) => {
    await toggle();
    await told.some((each) => each.method === "notifications/tools/list_changed");
  },
  logs: async (client, call) => {
    await client.setLoggingLevel("info");
    await call({});
    return logs;
  },
  close: async (client) => {
    if (way !== "sse") await transport.terminateSession();
    await client.close();
  },
};

let revision;
transport.setProtocolVersion = ((before) => (version) => {
  revision = version; // this SDK tells its transport, and nobody else
  return before?.call(transport, version);
})(transport.setProtocolVersion);
await client.connect(transport);
await visit(client, sdk, revision, wanted);
