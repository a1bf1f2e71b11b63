"""A simulation: real clients and real servers in memory, with faults, decided by one seed.

    python -m tests.simulation --seeds 1000 --from 0

| Module | Content |
|---|---|
| `plan` | the plan that a seed decides, as plain data: the transport, the clients, their moves, the line, the faults |
| `network` | connections in memory: windows, delays, splits, cuts, dead lines, unreachable addresses |
| `monitor` | calls, handler runs and outcomes, and the rules that hold in every world |
| `servers` | the server, a relay before it, an authorization server, a hostile client |
| `clients` | programs with a client that make their moves |
| `tasks` | tasks: the store, the moves, and their rules |
| `replicas` | several processes of one server: their shared store, and processes that pause |
| `world` | one run of a plan under a mock clock, and the check that it leaves nothing behind |
| `tally` | the figures of many worlds |
| `shrink` | the smallest plan that still breaks a rule, as a test to paste |
| `mistakes` | deliberate mistakes in trio_mcp, to test that the rules find them |

`docs/simulation.md` says how to use it, and how to simulate a program of your own.
"""
