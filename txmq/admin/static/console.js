// The console: asks the broker every two seconds and draws what it says.
//
// Names, reasons and errors come from strangers. They only ever become text (textContent), never markup, and the page's
// policy allows no script but this file.
"use strict";

const EVERY_MS = 2000;
const PATIENCE_MS = 10000;
const ROWS_SHOWN = 200;
const GROUPS_WITH_LETTERS = 20;
const LETTERS_OF_A_GROUP = 20;
const PAGES_OF_LETTERS = 4; // abandoned letters are on them, too, and may fill the first ones

const element = (id) => document.getElementById(id);

function make(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = String(text);
  if (kind) made.className = kind;
  return made;
}

async function get(path) {
  const response = await fetch("/api/v1/" + path, { signal: AbortSignal.timeout(PATIENCE_MS) });
  const value = await response.json();
  if (!response.ok) throw new Error(value.message);
  return { value, now: Date.parse(response.headers.get("Date")) * 1000 };
}

function number(value) {
  return Number(value).toLocaleString("en");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

function age(now, then) {
  const seconds = Math.max(0, Math.round((now - then) / 1e6));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

// A column: its title, what it shows of a row, and its class, fixed or told by the row.
const text = (title, show, kind = "") => ({ title, show, kind });
const count = (title, field, alarm = "") => ({
  title,
  show: (row) => number(row[field]),
  kind: (row) => "number " + (row[field] > 0 ? alarm : ""),
  head: "number",
});

function draw(id, rows, columns, nothing) {
  const place = element(id);
  if (!rows.length) {
    place.replaceChildren(make("p", nothing, "empty"));
    return;
  }
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const column of columns) head.append(make("th", column.title, column.head));
  const body = table.createTBody();
  for (const row of rows.slice(0, ROWS_SHOWN)) {
    const line = body.insertRow();
    for (const { show, kind } of columns) {
      line.append(make("td", show(row), typeof kind === "function" ? kind(row) : kind));
    }
  }
  place.replaceChildren(table);
  if (rows.length > ROWS_SHOWN) place.append(make("p", `and ${number(rows.length - ROWS_SHOWN)} more`, "note"));
}

function drawFacts(broker) {
  element("name").textContent = broker.name;
  const facts = [
    ["Disk", broker.read_only ? "full" : "writable", broker.read_only ? "bad" : "good"],
    ["Topics", number(broker.topics)],
    ["Groups", number(broker.groups)],
    ["Undecided", number(broker.undecided), broker.undecided ? "warn" : ""],
    ["Log", bytes(broker.end)],
    ["Not yet on disk", bytes(broker.end - broker.durable)],
    ["Segments", number(broker.segments)],
    ["Starts", number(broker.boot_epoch)],
    ["Resolvers", broker.resolvers.join(", ") || "none"],
    ["Log id", broker.log_id],
  ];
  element("facts").replaceChildren(
    ...facts.map(([name, value, kind]) => {
      const fact = make("div");
      fact.title = value;
      fact.append(make("dt", name), make("dd", value, kind));
      return fact;
    }),
  );
}

const TOPICS = [
  text("Topic", (row) => row.name),
  count("Messages", "messages"),
  count("Partitions", "partitions"),
  count("Shape", "epoch"),
];

const GROUPS = [
  text("Group", (row) => row.group),
  text("Mode", (row) => row.mode),
  text("State", (row) => row.state, (row) => ({ active: "good", paused: "warn" })[row.state] || ""),
  text("Topics", (row) => row.topics.join(", "), "long"),
  count("Members", "members"),
  count("Lag", "lag"),
  count("Leased", "leased"),
  count("Retrying", "retrying", "warn"),
  count("Parked", "parked", "warn"),
  count("Fences", "fences", "warn"),
  count("Dead letters", "letters", "bad"),
];

const transactions = (now) => [
  text("Age", (row) => age(now, row.stored_at)),
  text("State", (row) => (row.in_doubt ? "in doubt" : row.state), (row) => (row.in_doubt ? "bad" : "warn")),
  text("Service", (row) => row.service),
  count("Messages", "messages"),
  text("Decided by", (row) => row.decider[0]),
  count("Asked", "tries"),
  text("Token", (row) => row.token, "code"),
];

const letters = (now) => [
  text("Group", (row) => row.group),
  text("Died", (row) => age(now, row.dead_at) + " ago"),
  text("Message", (row) => `${row.topic}/${row.partition}/${row.offset}`, "code"),
  text("Key", (row) => row.key ?? ""),
  count("Attempts", "attempts"),
  text("Error", (row) => row.error_type, "bad"),
  text("Reason", (row) => row.reason || row.error_text, "long"),
  text("Fingerprint", (row) => row.fingerprint, "code"),
  count("Parked behind", "parked_behind", "warn"),
];

async function dead(group) {
  const found = [];
  for (let after = 0, page = 0; after !== null && page < PAGES_OF_LETTERS && found.length < LETTERS_OF_A_GROUP; page += 1) {
    const path = `letters/${encodeURIComponent(group)}?after=${after}&limit=${2 * LETTERS_OF_A_GROUP}`;
    const { value } = await get(path);
    found.push(...value.letters.filter((letter) => letter.state === "dead"));
    after = value.next;
  }
  return found.slice(0, LETTERS_OF_A_GROUP);
}

async function refresh() {
  const [broker, topics, groups, undecided] = await Promise.all(
    ["broker", "topics", "groups", `transactions?state=undecided&limit=${ROWS_SHOWN}`].map(get),
  );
  const bearing = groups.value.groups.filter((group) => group.letters > 0).slice(0, GROUPS_WITH_LETTERS);
  const rows = (await Promise.all(bearing.map(({ group }) => dead(group)))).flat();
  drawFacts(broker.value);
  draw("topics", topics.value.topics, TOPICS, "No topics.");
  draw("groups", groups.value.groups, GROUPS, "No consumer groups.");
  draw("transactions", undecided.value.transactions, transactions(broker.now), "Everything is decided.");
  draw("letters", rows, letters(broker.now), "No dead letters.");
}

function tell(message, kind) {
  element("status").textContent = message;
  element("status").className = kind;
}

async function run() {
  if (!document.hidden) {
    try {
      await refresh();
      tell("live, as of " + new Date().toLocaleTimeString(), "");
    } catch (error) {
      tell("not up to date: " + error.message, "bad");
    }
  }
  setTimeout(run, EVERY_MS);
}

run();
