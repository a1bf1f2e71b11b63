// What the official TypeScript SDK 2.x sees of a server: typescript2.mjs URL session|modern|sse [behaviour ...]

import { Client, LOG_LEVEL_META_KEY, SSEClientTransport, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { Latest } from "./report.mjs";
import { answers, visit } from "./visit.mjs";

const [url, way, ...wanted] = process.argv.slice(2);
const modern = way === "modern";
const told = new Latest();
const logs = [];
const client = new Client(
  { name: "visitor", version: "1" },
  {
    capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } },
    versionNegotiation: { mode: modern ? "auto" : "legacy" },
  },
);
client.setRequestHandler("sampling/createMessage", ({ params }) => answers.sample(params));
client.setRequestHandler("elicitation/create", answers.elicit);
client.setRequestHandler("roots/list", answers.roots);
client.setNotificationHandler("notifications/message", ({ params }) => {
  logs.push(`${params.level} ${params.data}`);
});
client.setNotificationHandler("notifications/resources/updated", (each) => told.add(each));
client.setNotificationHandler("notifications/tools/list_changed", (each) => told.add(each));

const transport = way === "sse" ? new SSEClientTransport(new URL(url)) : new StreamableHTTPClientTransport(new URL(url));
const sdk = {
  call: (client, params, options) => client.callTool(params, options),
  subscribe: async (client, touch) => {
    const uri = "peers://greeting";
    const listening = modern ? await client.listen({ resourceSubscriptions: [uri] }) : null;
    if (!listening) await client.subscribeResource({ uri });
    await touch();
    const update = await told.some((each) => each.method === "notifications/resources/updated");
    if (!listening) await client.unsubscribeResource({ uri });
    else await listening.close();
    return update.params.uri;
  },
  listChanged: async (client, toggle) => {
    const listening = modern ? await client.listen({ toolsListChanged: true }) : null;
    await toggle();
    await told.some((each) => each.method === "notifications/tools/list_changed");
    await listening?.close();
  },
  logs: async (client, call) => {
    if (!modern) await client.setLoggingLevel("info");
    await call(modern ? { _meta: { [LOG_LEVEL_META_KEY]: "info" } } : {});
    return logs;
  },
  close: async (client) => {
    if (way === "session") await transport.terminateSession();
    await client.close();
  },
};

await client.connect(transport);
await visit(client, sdk, client.getNegotiatedProtocolVersion(), wanted);
