// Tasks of the official TypeScript SDK 1.x: tasks_typescript1.mjs serve on stdio, or serve session over HTTP, or
// visit URL or visit COMMAND ...
// The visit prints one JSON object, with the outcome of each tool that runs as a task.

import { randomUUID } from "node:crypto";

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { InMemoryTaskMessageQueue, InMemoryTaskStore } from "@modelcontextprotocol/sdk/experimental/tasks";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import { CallToolResultSchema, ElicitRequestSchema, ElicitResultSchema } from "@modelcontextprotocol/sdk/types.js";
import { z } from "zod";

import { listen } from "./server_common.mjs";

const [mode, ...command] = process.argv.slice(2);
const text = (words, isError = false) => ({ content: [{ type: "text", text: words }], isError });

function makeServer() {
  const taskStore = new InMemoryTaskStore();
  const taskMessageQueue = new InMemoryTaskMessageQueue();
  const tasks = { list: {}, cancel: {}, requests: { tools: { call: {} } } };
  const options = { capabilities: { tasks }, taskStore, taskMessageQueue, defaultTaskPollInterval: 50 };
  const server = new McpServer({ name: "tasks", version: "1" }, options);
  const works = {
    async slow_compute({ seconds, label }) {
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      return text(`${label} took ${seconds} seconds`);
    },
    async confirm_delete({ filename }, task, extra) {
      const requestedSchema = { type: "object", properties: { confirm: { type: "boolean" } }, required: ["confirm"] };
      const params = { mode: "form", message: `Delete ${filename}?`, requestedSchema };
      const related = { relatedTask: { taskId: task.taskId } };
      await extra.taskStore.updateTaskStatus(task.taskId, "input_required");
      const answer = await extra.sendRequest({ method: "elicitation/create", params }, ElicitResultSchema, related);
      await extra.taskStore.updateTaskStatus(task.taskId, "working");
      return text(`${filename}: ${answer.action} ${JSON.stringify(answer.content)}`);
    },
    async failing_job() {
      return text("the job has failed", true);
    },
  };
  const add = (name, taskSupport, inputSchema) =>
    server.experimental.tasks.registerToolTask(name, { inputSchema, execution: { taskSupport } }, {
      async createTask(given, extra) {
        const task = await extra.taskStore.createTask({ ttl: 60000, pollInterval: 50 });
        works[name](given, task, extra).then(
          (result) => extra.taskStore.storeTaskResult(task.taskId, result.isError ? "failed" : "completed", result),
          () => {}, // the task and its elicitation were cancelled
        ).catch(() => {}); // the task was cancelled, so it already has its last status
        return { task };
      },
      getTask: (_, extra) => extra.taskStore.getTask(extra.taskId),
      getTaskResult: (_, extra) => extra.taskStore.getTaskResult(extra.taskId),
    });
  add("slow_compute", "optional", { seconds: z.number(), label: z.string() });
  add("confirm_delete", "required", { filename: z.string() });
  add("failing_job", "required", {});
  server.registerTool("greet", { inputSchema: { name: z.string() } }, async ({ name }) => text(`Hello, ${name}!`));
  return server;
}

// Each connection has a server of its own.
function serveHttp() {
  const sessions = new Map();
  listen(async (request, response) => {
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

const serve = () => (command.length ? serveHttp() : makeServer().connect(new StdioServerTransport()));

async function visit() {
  const clientTasks = { list: {}, cancel: {}, requests: { elicitation: { create: {} } } };
  const options = { capabilities: { elicitation: {}, tasks: clientTasks }, taskStore: new InMemoryTaskStore() };
  const client = new Client({ name: "tasks", version: "1" }, options);
  let created = 0;
  client.setRequestHandler(ElicitRequestSchema, async ({ params }, { taskStore, taskRequestedTtl }) => {
    const answer = { action: "accept", content: { confirm: true } };
    if (!params.task) return answer;
    const task = await taskStore.createTask({ ttl: taskRequestedTtl, pollInterval: 50 });
    setTimeout(() => taskStore.storeTaskResult(task.taskId, "completed", answer), 100);
    created++;
    return { task };
  });
  const stdioTransport = () => new StdioClientTransport({ command: command[0], args: command.slice(1), stderr: "inherit" });
  await client.connect(command.length > 1 ? stdioTransport() : new StreamableHTTPClientTransport(new URL(command[0])));
  const tasks = client.experimental.tasks;
  const seen = { capability: client.getServerCapabilities().tasks };
  const { tools } = await client.listTools();
  seen.support = Object.fromEntries(
    tools.filter((tool) => ["slow_compute", "confirm_delete", "failing_job"].includes(tool.name))
      .map((tool) => [tool.name, tool.execution?.taskSupport]),
  );
  seen.greet = (await client.callTool({ name: "greet", arguments: { name: "Ada" } })).content[0].text;
  const run = async (name, given) => {
    const states = [];
    let id, result;
    for await (const message of tasks.callToolStream({ name, arguments: given }, CallToolResultSchema, { task: {} })) {
      if (message.task) {
        id = message.task.taskId;
        states.push(message.task.status);
      }
      result = message.result;
    }
    result ??= await tasks.getTaskResult(id, CallToolResultSchema); // the stream has no result of a failed task
    seen.related = result._meta?.["io.modelcontextprotocol/related-task"]?.taskId === id;
    seen.asked ||= states.includes("input_required");
    return [states[0], (await tasks.getTask(id)).status, Boolean(result.isError), result.content[0].text];
  };
  const refused = (call) => call.then(() => "a result", (error) => error.code);
  seen.slow = await run("slow_compute", { seconds: 0.1, label: "sum" });
  seen.confirm = await run("confirm_delete", { filename: "a.txt" });
  seen.failing = await run("failing_job", {});
  created = 0;
  const later = await client.callTool({ name: "ask_later", arguments: {} });
  seen.later = [later.content[0].text, created];
  seen.plain_required = await refused(client.callTool({ name: "failing_job", arguments: {} }));
  const greet = { name: "greet", arguments: { name: "Ada" } };
  seen.task_forbidden = await refused(client.callTool(greet, CallToolResultSchema, { task: {} }));
  for await (const message of tasks.callToolStream(
    { name: "slow_compute", arguments: { seconds: 60, label: "long" } }, CallToolResultSchema, { task: {} },
  )) {
    if (message.type !== "taskCreated") continue;
    const { taskId } = message.task;
    seen.listed = (await tasks.listTasks()).tasks.some((each) => each.taskId === taskId);
    seen.cancelled = (await tasks.cancelTask(taskId)).status;
    seen.cancelled_twice = await refused(tasks.cancelTask(taskId));
    break;
  }
  seen.unknown = await refused(tasks.getTask("unknown"));
  console.log(JSON.stringify(seen));
  await client.close();
  options.taskStore.cleanup(); // its timers would keep the process alive
}

await (mode === "serve" ? serve() : visit());
