"""Extensions of the protocol.  `server` and `client` do not know them; each is loaded when it is first used."""
