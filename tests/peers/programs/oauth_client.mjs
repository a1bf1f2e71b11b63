// A client of the official TypeScript SDK 1.x or 2.x that gets its tokens by OAuth:
// oauth_client.mjs URL session|modern TOOL
// The server has the tool TOOL, and a tool `write`, which needs another scope.  The output is that of oauth_client.py.

import { reporter, tell } from "./report.mjs";

const [target, way, plain] = process.argv.slice(2);
const CALLBACK = "http://127.0.0.1:9/callback";

async function sdk() {
  try {
    return await import("@modelcontextprotocol/client");
  } catch {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    return { Client, ...(await import("@modelcontextprotocol/sdk/client/streamableHttp.js")), old: true };
  }
}

// A browser with a user that allows everything: it follows redirects, keeps cookies, and presses Allow.
class Browser {
  #cookies = {};

  async visit(url) {
    let form;
    for (let hop = 0; hop < 10; hop++) {
      if (`${url}`.startsWith(CALLBACK)) return new URL(url).searchParams;
      const cookie = Object.entries(this.#cookies).map((each) => each.join("=")).join("; ");
      const answer = await fetch(url, { method: form ? "POST" : "GET", body: form, headers: { cookie }, redirect: "manual" });
      for (const each of answer.headers.getSetCookie()) {
        const [name, value] = each.split(";")[0].split("=");
        this.#cookies[name] = value;
      }
      const text = await answer.text();
      if (answer.headers.get("location")) {
        [url, form] = [new URL(answer.headers.get("location"), url), undefined];
        continue;
      }
      const action = /<form method="post" action="([^"]*)">/.exec(text);
      if (!action) throw new Error(`there is no form: ${answer.status} ${text}`);
      form = new URLSearchParams({ decision: "allow" });
      for (const [, name, value] of text.matchAll(/<input type="hidden" name="([^"]*)" value="([^"]*)">/g)) form.set(name, value);
      url = new URL(action[1], url);
    }
    throw new Error("there are too many redirects");
  }
}

const browser = new Browser();
let [visits, times, client, tokens, verifier, back, state, discovered] = [0, 0];
const provider = {
  redirectUrl: CALLBACK,
  clientMetadata: { client_name: "Peer", redirect_uris: [CALLBACK], token_endpoint_auth_method: "none" },
  state: () => (state = crypto.randomUUID()),
  clientInformation: () => client,
  saveClientInformation: (given) => void (client = given),
  tokens: () => tokens,
  saveTokens: (given) => void ([tokens, times] = [given, times + 1]),
  saveCodeVerifier: (given) => void (verifier = given),
  codeVerifier: () => verifier,
  saveDiscoveryState: (given) => void (discovered = given),
  discoveryState: () => discovered,
  redirectToAuthorization: async (url) => {
    visits += 1;
    back = await browser.visit(url);
    if (back.get("state") !== state) throw new Error("the state is another one");
  },
};

const { Client, StreamableHTTPClientTransport, old } = await sdk();
const options = old ? {} : { versionNegotiation: { mode: way === "modern" ? "auto" : "legacy" } };
const open = () => {
  const made = new Client({ name: "visitor", version: "1" }, options);
  const transport = new StreamableHTTPClientTransport(new URL(target), { authProvider: provider });
  return [made, transport];
};

// Makes an attempt, and makes it again if the user had to authorize it first.
async function allowed(transport, attempt, again) {
  try {
    return await attempt();
  } catch (error) {
    if (!back) throw error;
    await transport.finishAuth(old ? back.get("code") : back);
    back = undefined;
    return await again();
  }
}

let [mcp, transport] = open();
await allowed(transport, () => mcp.connect(transport), () => {
  [mcp, transport] = open();
  return mcp.connect(transport);
});

async function call(name, args) {
  const attempt = () => mcp.callTool({ name, arguments: args });
  const result = await allowed(transport, attempt, attempt);
  return [result.content[0].text, visits, times];
}

const look = reporter([]);
await look("call", () => call(plain, {}));
await look("step up", () => call("write", { text: "milk" }));
tokens = { ...tokens, access_token: "an-expired-token" };
await look("refresh", () => call(plain, {}));
await look("scopes", async () => tokens.scope.split(" ").sort());
if (way === "session") await transport.terminateSession();
await mcp.close();
tell("end", "clean");
