// A client of the official TypeScript SDK 2.x:
// typescript2.mjs TARGET stdio|stdio-modern|session|modern|sse [behaviour ...]

import { Client, LOG_LEVEL_META_KEY, SSEClientTransport, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";
import { Received } from "./report.mjs";
import { answers, visit } from "./visit.mjs";

const [target, way, ...wanted] = process.argv.slice(2);
const modern = way.endsWith("modern");

function transportTo() {
  if (way.startsWith("stdio")) {
    const [command, ...args] = JSON.parse(target);
    return new StdioClientTransport({ command, args });
  }
  return way === "sse" ? new SSEClientTransport(new URL(target)) : new StreamableHTTPClientTransport(new URL(target));
}

const notifications = new Received();
const logs = new Received();
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
  logs.add(`${params.level} ${params.logger} ${params.data.level}`);
});
for (const changed of ["resources/updated", "tools/list_changed", "resources/list_changed", "prompts/list_changed"]) {
  client.setNotificationHandler(`notifications/${changed}`, (each) => notifications.add(each));
}

const LISTS = { tools: "tools/list", resources: "resources/list", templates: "resources/templates/list", prompts: "prompts/list" };
const transport = transportTo();
const sdk = {
  call: (client, params, options) => client.callTool(params, options),
  // Its list methods collect all pages; a plain request returns one page.
  hasMore: async (client, kind) => (await client.request({ method: LISTS[kind] })).nextCursor !== undefined,
  subscribe: async (client, uri, touch) => {
    const listening = modern ? await client.listen({ resourceSubscriptions: [uri] }) : null;
    if (!listening) await client.subscribeResource({ uri });
    await touch();
    const update = await notifications.first((each) => each.method === "notifications/resources/updated");
    if (!listening) await client.unsubscribeResource({ uri });
    else await listening.close();
    return update.params.uri;
  },
  listChanged: async (client, kind, toggle) => {
    const listening = modern ? await client.listen({ [`${kind}ListChanged`]: true }) : null;
    await toggle();
    await notifications.first((each) => each.method === `notifications/${kind}/list_changed`);
    await listening?.close();
  },
  logs: async (client, level, call) => {
    if (!modern) await client.setLoggingLevel(level);
    await call(modern ? { _meta: { [LOG_LEVEL_META_KEY]: level } } : {});
    await logs.first((each) => each.startsWith("error "));
    return logs.seen;
  },
  close: async (client) => {
    if (way === "session") await transport.terminateSession();
    await client.close();
  },
};

await client.connect(transport);
await visit(client, sdk, [client.getNegotiatedProtocolVersion(), client.getInstructions()], wanted);
