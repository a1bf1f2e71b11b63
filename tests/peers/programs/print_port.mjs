// Prints the port of a server that does not print it.  Node loads it before the server:
// ``node --import print_port.mjs server.js``.

import { Server } from "node:net";

const listen = Server.prototype.listen;
Server.prototype.listen = function (...args) {
  this.once("listening", () => console.error(`running on http://127.0.0.1:${this.address().port}`));
  return listen.apply(this, args);
};
