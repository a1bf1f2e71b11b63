// The conformance suite plays servers without naming a host, which would have them listen on every interface.  Loaded
// before it, this has them listen on 127.0.0.1.  A host given to listen() is looked up first, even if it is an address,
// and the suite asks for the port at once: so it is put in one step later, where a server is bound.
import { Server } from "node:net";

const bind = Server.prototype._listen2;
if (typeof bind !== "function") throw new Error("this node binds its servers in another way");

Server.prototype._listen2 = function (host, port, family, ...more) {
  const everywhere = host === null && port >= 0; // neither a pipe nor a handle that is bound
  return everywhere ? bind.call(this, "127.0.0.1", port, 4, ...more) : bind.call(this, host, port, family, ...more);
};
