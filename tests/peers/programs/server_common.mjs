// Common code of the servers with the official TypeScript SDKs: their content, and their HTTP listener.

import { createServer } from "node:http";
import { KEEP_ALIVE } from "./report.mjs";

export const PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mO4JGcEAALoASNSXim9AAAAAElFTkSuQmCC";
export const LEVELS = ["debug", "info", "notice", "warning", "error"];
export const REPLY = { type: "object", properties: { response: { type: "string" } }, required: ["response"] };

export const text = (text) => ({ type: "text", text });
export const textResult = (words) => ({ content: [text(words)] });
export const user = (content) => ({ role: "user", content });
export const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// The tags of cancelled calls of `interop_wait`.
export const cancelledTags = [];

export function wait({ seconds, tag }, signal) {
  return new Promise((done, failed) => {
    const timer = setTimeout(() => done(textResult(`waited ${tag}`)), seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      cancelledTags.push(tag);
      failed(new Error("cancelled"));
    });
  });
}

export const sum = ({ a, b }) => ({ sum: a + b, label: `${a}+${b}` });
export const elicitationResult = ({ action, content }) => textResult(`action=${action} ${JSON.stringify(content)}`);

export const RESOURCES = {
  "test://static-text": { mimeType: "text/plain", text: "This is the content of the static text resource." },
  "test://static-binary": { mimeType: "image/png", blob: PNG },
  "test://watched-resource": { mimeType: "text/plain", text: "This is the content of the watched resource." },
};
export const DYNAMIC = { mimeType: "text/plain", text: "there" };
export const TEMPLATE = "test://template/{id}/data";
export const item = (id) => ({
  mimeType: "application/json",
  text: JSON.stringify({ id, templateTest: true, data: `Data for ID: ${id}` }),
});

// The arguments of each prompt, and its messages.
export const PROMPTS = {
  test_simple_prompt: [[], () => [user(text("This is a simple prompt for testing."))]],
  test_prompt_with_arguments: [
    ["arg1", "arg2"],
    ({ arg1, arg2 }) => [user(text(`Prompt with arguments: arg1='${arg1}', arg2='${arg2}'`))],
  ],
  test_prompt_with_embedded_resource: [
    ["resourceUri"],
    ({ resourceUri: uri }) => [
      user({ type: "resource", resource: { uri, mimeType: "text/plain", text: "It is embedded." } }),
      user(text("Please process it.")),
    ],
  ],
  test_prompt_with_image: [
    [],
    () => [user({ type: "image", data: PNG, mimeType: "image/png" }), user(text("Please analyze it."))],
  ],
};

export function completions(name, value, context) {
  const others = context?.arguments ?? {};
  const known = {
    arg1: ["alpha", "alphabet", "beta", "gamma"],
    arg2: "arg1" in others ? [`${others.arg1}-2`] : [],
    id: ["1", "12", "2"],
  };
  return known[name].filter((each) => each.startsWith(value));
}

export function listen(answer) {
  const http = createServer((request, response) => answer(request, response, new URL(request.url, "http://127.0.0.1")));
  http.keepAliveTimeout = KEEP_ALIVE;
  http.listen(0, "127.0.0.1", () => console.error(`running on http://127.0.0.1:${http.address().port}`));
}
