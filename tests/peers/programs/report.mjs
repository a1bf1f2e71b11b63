// Common code of the programs for the official TypeScript SDKs: try one behaviour after another, and print the results.
// Each line of the output is a JSON object, {"behaviour": ..., "seen": ...}.  An exception of a client is a result, too.

// Characters that can break a frame: quotes, all kinds of line ends (U+2028 and similar characters end a line for some
// readers of event streams), astral characters, and control characters that JSON must escape.
export const ODD = 'quote " backslash \\ é 東京 🦜 \u2028\u2029\u0085\u000b\u000c \r\n\t\x01\x7f end';
export const LARGE = "0123456789 æøå 東京 🦜\n".repeat(29_000); // close to a million bytes
const PATIENCE = 60_000; // milliseconds for one behaviour, on a busy machine
export const KEEP_ALIVE = 300_000; // milliseconds for which a server keeps an unused connection; see report.py

export function tell(behaviour, seen) {
  process.stdout.write(JSON.stringify({ behaviour, seen }) + "\n");
}

// Tries the named behaviours, or all of them if the list has no name.  A name with a minus before it is left out.
export function reporter(named) {
  const wanted = named.filter((each) => !each.startsWith("-"));
  return async (behaviour, at) => {
    if (named.includes(`-${behaviour}`) || (wanted.length && !wanted.includes(behaviour))) return;
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error("it took too long")), PATIENCE);
    });
    try {
      tell(behaviour, await Promise.race([at(), late]));
    } catch (error) {
      tell(behaviour, { raised: `${error}`.slice(0, 300), code: error.code ?? null });
    } finally {
      clearTimeout(timer);
    }
  };
}

// An SDK waits two seconds for a server to exit after the end of its input, then sends a signal.  After this call it
// waits as long as for a behaviour, because on a busy machine a server may need longer than two seconds.
export function allowSlowExit() {
  const usual = globalThis.setTimeout;
  globalThis.setTimeout = (then, wait, ...more) => usual(then, wait === 2_000 ? PATIENCE : wait, ...more);
}

// The code of the error of this call, or "isError"; if the call is not refused, its result, for the table.
export async function refused(call) {
  try {
    const result = await call;
    return result.isError ? "isError" : `no error: ${JSON.stringify(result)}`.slice(0, 300);
  } catch (error) {
    return error.code ?? `${error}`.slice(0, 300);
  }
}

// The arguments of a callback, and a way to wait for them.
export class Received {
  seen = [];
  waiting = [];

  add(seen) {
    this.seen.push(seen);
    for (const wake of this.waiting.splice(0)) wake();
  }

  async first(matches) {
    for (;;) {
      const found = this.seen.find(matches);
      if (found) return found;
      await new Promise((wake) => this.waiting.push(wake));
    }
  }
}
