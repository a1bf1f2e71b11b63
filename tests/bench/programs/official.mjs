// The server of the official TypeScript SDK with the tools of the bench: official.mjs stdio|http TOOLS json|sse
// It is an `McpServer`, made anew for each connection, or for each request of 2026-07-28 over HTTP, as the SDK wants it.
// By HTTP it prints the port it listens on.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import * as sdk from "@modelcontextprotocol/server";
import * as z from "zod";

const [transport, tools, style] = process.argv.slice(2);
const said = (text) => ({ content: [{ type: "text", text }] });
const schemas = {
  echo: z.object({ text: z.string() }),
  wait: z.object({ seconds: z.number() }),
  report: z.object({ number: z.int() }),
  forecast: z.object({ city: z.string(), days: z.int().default(3), units: z.string().default("metric") }),
};

async function report({ number }, { mcpReq }) {
  const { progressToken } = mcpReq._meta;
  for (let progress = 1; progress <= number; progress += 1) {
    await mcpReq.notify({ method: "notifications/progress", params: { progressToken, progress, total: number } });
  }
  return said("reported");
}

function made() {
  const server = new sdk.McpServer({ name: "bench", version: "1" });
  const tool = (name, description, schema, run, title) =>
    server.registerTool(name, { description, title, inputSchema: schema }, run);
  tool("echo", "Say the same again.", schemas.echo, ({ text }) => said(text));
  tool("wait", "Take that long.", schemas.wait, async ({ seconds }) => {
    await new Promise((done) => setTimeout(done, seconds * 1000));
    return said("waited");
  });
  tool("report", "Report progress so many times.", schemas.report, report);
  for (let each = 3; each < Number(tools); each += 1) {
    const title = `The forecast by the station ${each}`;
    const description = "What there are many of, so that there are many.";
    tool(`forecast_${each}`, description, schemas.forecast, ({ city }) => said(city), title);
  }
  return server;
}

async function byHttp() {
  const { NodeStreamableHTTPServerTransport, toNodeHandler } = await import("@modelcontextprotocol/node");
  const modern = toNodeHandler(
    sdk.createMcpHandler(made, { legacy: "reject", responseMode: style === "json" ? "auto" : "sse" }),
  );
  const sessions = new Map();
  const http = createServer(async (request, response) => {
    if (request.headers["mcp-protocol-version"] === "2026-07-28") return modern(request, response);
    let transport = sessions.get(request.headers["mcp-session-id"]);
    if (!transport) {
      transport = new NodeStreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        enableJsonResponse: style === "json",
        onsessioninitialized: (id) => sessions.set(id, transport),
      });
      await made().connect(transport);
    }
    return transport.handleRequest(request, response);
  });
  http.keepAliveTimeout = 600_000; // its load takes turns with others
  http.listen({ port: 0, host: "127.0.0.1", backlog: 5000 }, () => console.log(http.address().port));
}

async function byPipe() {
  const { serveStdio } = await import("@modelcontextprotocol/server/stdio");
  serveStdio(made);
}

await { stdio: byPipe, http: byHttp }[transport]();
