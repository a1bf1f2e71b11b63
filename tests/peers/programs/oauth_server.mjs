// A protected server with the official TypeScript SDK 1.x, and the authorization server that the SDK builds from a
// provider, at one origin: oauth_server.mjs together.  It allows each authorization request without a page.

import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import express from "express";
import { requireBearerAuth } from "@modelcontextprotocol/sdk/server/auth/middleware/bearerAuth.js";
import { getOAuthProtectedResourceMetadataUrl, mcpAuthRouter } from "@modelcontextprotocol/sdk/server/auth/router.js";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";
import { InvalidGrantError, InvalidTokenError } from "@modelcontextprotocol/sdk/server/auth/errors.js";

const [clients, codes, tokens, refreshes, grants] = [new Map(), new Map(), new Map(), new Map(), []];

function remove(from, secret) {
  const found = from.get(secret);
  if (!found) throw new InvalidGrantError("it is not known");
  from.delete(secret);
  return found;
}

function issue(clientId, scopes, resource) {
  const [access, refresh] = [randomUUID(), randomUUID()];
  tokens.set(access, { token: access, clientId, scopes, resource, expiresAt: Date.now() / 1000 + 3600 });
  refreshes.set(refresh, { scopes, resource });
  const response = { access_token: access, token_type: "bearer", expires_in: 3600, refresh_token: refresh };
  return { ...response, scope: scopes.join(" ") };
}

const provider = {
  clientsStore: {
    getClient: (id) => clients.get(id),
    registerClient: (client) => {
      clients.set(client.client_id, client);
      return client;
    },
  },
  async authorize(client, asked, response) {
    const code = randomUUID();
    codes.set(code, asked);
    const back = new URL(asked.redirectUri);
    back.searchParams.set("code", code);
    if (asked.state !== undefined) back.searchParams.set("state", asked.state);
    response.redirect(back.href);
  },
  async challengeForAuthorizationCode(client, code) {
    const asked = codes.get(code);
    if (!asked) throw new InvalidGrantError("it is not known");
    return asked.codeChallenge;
  },
  async exchangeAuthorizationCode(client, code) {
    const asked = remove(codes, code);
    grants.push("authorization_code");
    return issue(client.client_id, asked.scopes ?? [], asked.resource);
  },
  async exchangeRefreshToken(client, refresh, scopes) {
    const old = remove(refreshes, refresh);
    grants.push("refresh_token");
    return issue(client.client_id, scopes ?? old.scopes, old.resource);
  },
  async verifyAccessToken(token) {
    const found = tokens.get(token);
    if (!found) throw new InvalidTokenError("it is not known");
    return found;
  },
};

function makeServer() {
  const server = new McpServer({ name: "notes", version: "1" });
  const result = (text) => ({ content: [{ type: "text", text }] });
  const tool = (name, run) => server.registerTool(name, {}, (extra) => result(run(extra)));
  tool("who", ({ authInfo }) => authInfo.scopes.join(" "));
  tool("audience", ({ authInfo }) => authInfo.resource.href);
  tool("expire", () => {
    tokens.clear();
    return grants.join(" ");
  });
  tool("forget", () => {
    for (const each of [clients, codes, tokens, refreshes]) each.clear();
    return "forgotten";
  });
  return server;
}

const app = express();
const http = createServer(app).listen(0, "127.0.0.1", () => {
  const origin = `http://127.0.0.1:${http.address().port}`;
  const resource = new URL("/mcp", origin);
  const scopes = ["notes:read"];
  app.use(mcpAuthRouter({ provider, issuerUrl: new URL(origin), resourceServerUrl: resource, scopesSupported: scopes }));
  const resourceMetadataUrl = getOAuthProtectedResourceMetadataUrl(resource);
  app.all("/mcp", requireBearerAuth({ verifier: provider, requiredScopes: scopes, resourceMetadataUrl }), async (request, response) => {
    const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined });
    await makeServer().connect(transport);
    await transport.handleRequest(request, response);
  });
  console.error(`running on ${origin}`);
});
