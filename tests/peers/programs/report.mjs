// What the programs for the official TypeScript SDKs have in common: looking at one behaviour after another, and telling.
// Each line of the output is a JSON object, {"behaviour": ..., "seen": ...}; what a client threw is seen as well.

// What each kind of text does to a frame: quotes, line ends of every kind (U+2028 and friends end a line for some who
// read event streams), astral characters, and control characters that JSON must escape.
export const ODD = 'quote " backslash \\ é 東京 🦜 \u2028\u2029\u0085\u000b\u000c \r\n\t\x01\x7f end';
export const LARGE = "0123456789 æøå 東京 🦜\n".repeat(29_000); // close to a million bytes
const PATIENCE = 60_000; // milliseconds for one behaviour, on a busy machine
export const KEPT = 300_000; // milliseconds that a server keeps a connection which is not used; see report.py

export function tell(behaviour, seen) {
  process.stdout.write(JSON.stringify({ behaviour, seen }) + "\n");
}

// Looks at the behaviours that are named; at all, if none is; but never at one that is named with a minus before it.
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

// From now on, where an SDK would give a server two seconds to end with its input, it has as long as a behaviour may take:
// that it needs longer on a busy machine is no reason for a signal.
export function patient() {
  const usual = globalThis.setTimeout;
  globalThis.setTimeout = (then, wait, ...more) => usual(then, wait === 2_000 ? PATIENCE : wait, ...more);
}

// How the call was refused: by the code of an error, or by a result that says so; or what it gave instead, for the table
// to show.
export async function refused(call) {
  try {
    const result = await call;
    return result.isError ? "isError" : `no error: ${JSON.stringify(result)}`.slice(0, 300);
  } catch (error) {
    return error.code ?? `${error}`.slice(0, 300);
  }
}

// What a callback was told, to be waited for.
export class Latest {
  seen = [];
  waiting = [];

  add(seen) {
    this.seen.push(seen);
    for (const wake of this.waiting.splice(0)) wake();
  }

  async some(which) {
    for (;;) {
      const found = this.seen.find(which);
      if (found) return found;
      await new Promise((wake) => this.waiting.push(wake));
    }
  }
}
