// The server of the official TypeScript SDK with the tools of the bench: official.mjs stdio|http TOOLS json|sse [works]
// With `works` it also serves the requests of tests/bench/works.py.
// As the SDK requires, each connection has a new `McpServer`, and so has each request of 2026-07-28 over HTTP.
// Over HTTP it prints its port.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import * as sdk from "@modelcontextprotocol/server";
import * as z from "zod";

const [transport, tools, style, more] = process.argv.slice(2);
const textResult = (text) => ({ content: [{ type: "text", text }] });
const schemas = {
  echo: z.object({ text: z.string() }),
  wait: z.object({ seconds: z.number() }),
  report: z.object({ number: z.int() }),
  city: z.object({ city: z.string() }),
  forecast: z.object({ city: z.string(), days: z.int().default(3), units: z.string().default("metric") }),
};

const works = {
  add: z.object({ a: z.int(), b: z.int() }),
  sum: z.object({ result: z.int() }),
  weather: z.object({
    city: z.string(),
    degrees: z.number(),
    humidity: z.int(),
    rain: z.boolean(),
    wind: z.object({ speed: z.number(), direction: z.string() }),
  }),
  book: z.object({
    guest: z.object({
      name: z.string().min(1).max(100),
      age: z.int().min(0).max(150),
      email: z.string().max(200),
    }),
    room: z.object({
      beds: z.int().min(1).max(8),
      floor: z.int().min(-2).max(100),
      view: z.enum(["sea", "garden"]),
    }),
    stay: z.object({ nights: z.int().min(1).max(30), price: z.number().min(0) }),
    wishes: z.array(z.string()).max(10),
    breakfast: z.boolean(),
  }),
  greet: z.object({ name: z.string() }),
};
const structured = (value, text) => ({ ...textResult(text), structuredContent: value });

function addWorks(server) {
  const tool = (name, description, inputSchema, run, outputSchema) =>
    server.registerTool(name, { description, inputSchema, outputSchema }, run);
  tool("blocks", "The weather in two blocks of content.", schemas.city, ({ city }) => ({
    content: [`Weather in ${city}`, "Light wind from the west."].map((text) => ({ type: "text", text })),
  }));
  tool("add", "Add two numbers.", works.add, ({ a, b }) => structured({ result: a + b }, `${a + b}`), works.sum);
  const weather = ({ city }) => {
    const found = { city, degrees: 21.5, humidity: 40, rain: false, wind: { speed: 3.5, direction: "west" } };
    return structured(found, JSON.stringify(found));
  };
  tool("weather", "The weather as data.", schemas.city, weather, works.weather);
  tool("book", "Book a room.", works.book, ({ guest }) => textResult(`booked for ${guest.name}`));
  const text = "Mostly sunny, 21 degrees, light wind from the west.";
  server.registerResource("note", "bench://note", { description: "A text.", mimeType: "text/plain" }, (uri) => ({
    contents: [{ uri: uri.href, mimeType: "text/plain", text }],
  }));
  server.registerPrompt("greet", { description: "Greet by name.", argsSchema: works.greet }, ({ name }) => ({
    messages: [{ role: "user", content: { type: "text", text: `Say hello to ${name}.` } }],
  }));
}

async function report({ number }, { mcpReq }) {
  const { progressToken } = mcpReq._meta;
  for (let progress = 1; progress <= number; progress += 1) {
    await mcpReq.notify({ method: "notifications/progress", params: { progressToken, progress, total: number } });
  }
  return textResult("reported");
}

function made() {
  const server = new sdk.McpServer({ name: "bench", version: "1" });
  const tool = (name, description, schema, run, title) =>
    server.registerTool(name, { description, title, inputSchema: schema }, run);
  tool("echo", "Say the same again.", schemas.echo, ({ text }) => textResult(text));
  tool("wait", "Take that long.", schemas.wait, async ({ seconds }) => {
    await new Promise((done) => setTimeout(done, seconds * 1000));
    return textResult("waited");
  });
  tool("report", "Report progress so many times.", schemas.report, report);
  for (let each = 3; each < Number(tools); each += 1) {
    const title = `The forecast by the station ${each}`;
    const description = "One of many tools that make the list very long.";
    tool(`forecast_${each}`, description, schemas.forecast, ({ city }) => textResult(city), title);
  }
  if (more) addWorks(server);
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
  http.keepAliveTimeout = 600_000; // the subjects take turns, so connections may be idle for so long
  http.listen({ port: 0, host: "127.0.0.1", backlog: 5000 }, () => console.log(http.address().port));
}

async function byPipe() {
  const { serveStdio } = await import("@modelcontextprotocol/server/stdio");
  serveStdio(made);
}

await { stdio: byPipe, http: byHttp }[transport]();
