"""A tool with a page: a host that shows pages (MCP Apps) draws a clock; other clients get the time as text.

python examples/clock_app.py

The page is one HTML document without a library.  It sends and receives JSON-RPC messages of the host by `postMessage`.
"""

from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from trio_mcp import Server, ToolError
from trio_mcp.extensions.apps import add_page

PAGE = """<!doctype html>
<title>Clock</title>
<style>
  body { font: 2rem var(--font-sans, sans-serif); color: var(--color-text-primary, #222); text-align: center }
</style>
<output id="time">...</output><br><small id="city"></small><br><button id="again">Again</button>
<script>
  let next = 1, waiting = {}
  const post = (message) => parent.postMessage({ jsonrpc: "2.0", ...message }, "*")
  const request = (method, params) => new Promise((done) => {
    waiting[next] = done
    post({ id: next++, method, params })
  })
  const show = (result) => {
    time.textContent = result.structuredContent?.time ?? result.content[0].text
    city.textContent = result.structuredContent?.city ?? ""
    post({ method: "ui/notifications/size-changed", params: { height: document.body.scrollHeight } })
  }
  addEventListener("message", ({ source, data }) => {
    if (source !== parent) return
    if (data.method === "ui/notifications/tool-result") show(data.params)
    else if (data.id in waiting && !data.method) { waiting[data.id](data.result); delete waiting[data.id] }
    else if (data.id !== undefined) post({ id: data.id, result: {} })  // ping, ui/resource-teardown
  })
  const call = (name, given) => request("tools/call", { name, arguments: given })
  again.onclick = async () => show(await call("refresh", { city: city.textContent }))
  const me = { appInfo: { name: "clock", version: "1.0" }, appCapabilities: {}, protocolVersion: "2026-01-26" }
  request("ui/initialize", me).then(() => post({ method: "ui/notifications/initialized" }))
</script>
"""

server = Server("clock", version="1.0")
clock = add_page(server, "ui://clock/face", PAGE, name="clock", description="A clock", prefers_border=True)


@dataclass
class Time:
    city: str
    time: str


@clock.tool
async def time_in(city: str) -> Time:
    """The time in a city, for example Europe/Oslo."""
    try:
        return Time(city, f"{datetime.now(ZoneInfo(city)):%H:%M}")
    except (KeyError, ValueError):
        raise ToolError(f"there is no time zone {city!r}; write it like Europe/Oslo") from None


@clock.tool(visibility=["app"])
async def refresh(city: str) -> Time:
    """The time again.  The page calls this tool; the model does not see it."""
    return await time_in(city)


if __name__ == "__main__":
    server.run()
