// Loaded before a server that cannot say which port it was given: ``node --import tells_port.mjs server.js``.

import { Server } from "node:net";

const listen = Server.prototype.listen;
Server.prototype.listen = function (...wanted) {
  this.once("listening", () => console.error(`running on http://127.0.0.1:${this.address().port}`));
  return listen.apply(this, wanted);
};
