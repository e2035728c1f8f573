// The main page of the console: broker, consumer groups, transactions, consumers' stores, dead
// letters and topics.
"use strict";

const GROUPS_WITH_LETTERS = 20;
const MAX_STALLED_GROUPS = 10;
const STALLED_PER_GROUP = 10;
const LETTERS_PER_GROUP = 20;

function drawFacts(broker) {
  element("name").textContent = broker.name;
  const facts = [
    ["Disk", broker.read_only ? "full" : "writable", broker.read_only ? "bad" : "good"],
    ["Topics", number(broker.topics)],
    ["Groups", number(broker.groups)],
    ["Undecided", number(broker.undecided), broker.undecided ? "warn" : ""],
    ["Log", bytes(broker.end)],
    ["Not on disk yet", bytes(broker.end - broker.durable)],
    ["Segments", number(broker.segments)],
    ["Starts", number(broker.boot_epoch)],
    ["Resolvers", broker.resolvers.join(", ") || "none"],
    ["Log id", broker.log_id],
  ];
  drawPairs("facts", facts);
}

const TOPICS = [
  text("Topic", (row) => row.name),
  count("Messages", "messages"),
  count("Partitions", "partitions"),
  count("Epoch", "epoch"),
];

const GROUPS = [
  text("Group", (row) => row.group),
  text("Mode", (row) => row.mode),
  text("State", (row) => row.state, (row) => ({ active: "good", paused: "warn" })[row.state] || ""),
  text("Topics", (row) => row.topics.join(", "), "long"),
  count("Members", "members"),
  count("Lag", "lag"),
  text("Oldest", (row) => (row.lag_ms ? `${Math.round(row.lag_ms / 1000)} s` : "")),
  count("Leased", "leased"),
  count("Retrying", "retrying", "warn"),
  count("Parked", "parked", "warn"),
  count("At consumers", "at_consumers", "warn"),
  count("Fences", "fences", "warn"),
  count("Dead letters", "letters", "bad"),
];

// The last line of a traceback names the error; `txmq dlq show` prints all lines.
const lastLine = (text) => text.trim().split("\n").pop();

const letters = (now) => [
  text("Group", (row) => row.group),
  text("Dead for", (row) => age(now, row.dead_at), "short"),
  text("Message", (row) => `${row.topic}/${row.partition}/${row.offset}`, "code"),
  text("Key", (row) => row.key ?? ""),
  count("Attempts", "attempts"),
  text("Error", (row) => row.error_type, "bad"),
  text("Reason", (row) => lastLine(row.reason || row.error_text), "long"),
  text("Fingerprint", (row) => row.fingerprint, "code"),
  count("Parked behind", "parked_behind", "warn"),
];

const stores = (now) => [
  text("Group", (row) => row.group),
  text("Store", (row) => row.store, "code"),
  text("State", (row) => row.state, (row) => (row.state === "no owner" ? "bad" : "")),
  text("Consumer", (row) => (row.host ? `${row.member} on ${row.host}` : row.member), "short"),
  count("Messages", "messages", "warn"),
  count("Attempts", "attempts"),
  text("Failing for", (row) => (row.oldest === null ? "" : age(now, row.oldest)), "short"),
];

const STALLED = [
  text("Group", (row) => row.group),
  text("Partition", (row) => `${row.topic}/${row.partition}`, "code"),
  count("Lag", "lag"),
  text("Oldest", (row) => (row.lag_ms ? `${Math.round(row.lag_ms / 1000)} s` : "")),
  text("Members", (row) => row.owners.join(", "), "short"),
  text("Head", (row) => row.head, "short"),
  text("Why", (row) => row.why, "long"),
];

async function stalledPartitions(group) {
  const { value } = await get(`groups/${encodeURIComponent(group)}`);
  const rows = value.positions.filter((row) => row.why || row.head);
  return rows.slice(0, STALLED_PER_GROUP).map((row) => ({ ...row, group }));
}

async function deadLetters(group) {
  const { value } = await get(`letters/${encodeURIComponent(group)}?limit=${LETTERS_PER_GROUP}`);
  return value.letters;
}

async function refresh() {
  const [broker, topics, groups, undecided, kept] = await Promise.all(
    ["broker", "topics", "groups", `transactions?state=undecided&limit=${ROWS_SHOWN}`, `stores?limit=${ROWS_SHOWN}`].map(get),
  );
  const failing = groups.value.groups.filter((group) => group.letters > 0).slice(0, GROUPS_WITH_LETTERS);
  const rows = (await Promise.all(failing.map(({ group }) => deadLetters(group)))).flat();
  const waiting = groups.value.groups.filter((group) => group.lag + group.retrying + group.parked > 0);
  const stalled = (await Promise.all(waiting.slice(0, MAX_STALLED_GROUPS).map(({ group }) => stalledPartitions(group)))).flat();
  drawFacts(broker.value);
  draw("topics", topics.value.topics, TOPICS, "No topics.");
  draw("groups", groups.value.groups, GROUPS, "No consumer groups.");
  draw("stalled", stalled, STALLED, "All partitions with a backlog are moving.");
  draw("transactions", undecided.value.transactions, transactions(broker.now), "No undecided transactions.");
  draw("stores", kept.value.stores, stores(broker.now), "No messages in local stores of consumers.");
  draw("letters", rows, letters(broker.now), "No dead letters.");
}

refreshForever(refresh);
