"""OAuth on Trio: tokens for clients, browsers, stores of tokens and keys, and the keys of issuers."""
