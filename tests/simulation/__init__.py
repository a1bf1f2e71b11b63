"""A simulation: real clients and real servers in memory, with faults, decided by one seed.

    python -m tests.simulation --seeds 1000 --from 0

| Module | What it has |
|---|---|
| `plan` | what a seed decides: the transport, the clients, their moves, the lines and the faults, all as plain data |
| `network` | connections in memory: windows, delays, splits, cuts, dead lines, unreachable addresses |
| `book` | calls, handler runs and outcomes, and the rules that hold in every world |
| `host` | the programs that serve: the server, a relay before it, an authorization server, a hostile client |
| `visitor` | the programs that call: clients with their moves |
| `tasks` | their tasks: the store, the moves, and the rules for them |
| `replicas` | several processes of one server: the store that they share, and processes that stand still |
| `world` | one run of a plan under a mock clock, and what may not be left after it |
| `tally` | what there was in many worlds |
| `shrink` | the smallest plan that still breaks a rule, as a test to paste |
| `mistakes` | faults put into trio_mcp on purpose, to see that the rules find them |

`docs/simulation.md` says how to use it, and how to simulate a program of your own.
"""
