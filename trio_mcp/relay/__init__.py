"""The relay: a server that stands for another one."""
