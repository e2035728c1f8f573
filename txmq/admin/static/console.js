// The console's first page: the broker, its groups, transactions, letters and topics.
"use strict";

const GROUPS_WITH_LETTERS = 20;
const GROUPS_LOOKED_AT = 10;
const STANDING_OF_A_GROUP = 10;
const LETTERS_OF_A_GROUP = 20;
const PAGES_OF_LETTERS = 4; // abandoned letters are on them, too, and may fill the first ones

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
  drawPairs("facts", facts);
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
  text("Oldest", (row) => (row.lag_ms ? `${Math.round(row.lag_ms / 1000)} s` : "")),
  count("Leased", "leased"),
  count("Retrying", "retrying", "warn"),
  count("Parked", "parked", "warn"),
  count("Fences", "fences", "warn"),
  count("Dead letters", "letters", "bad"),
];

// Of a traceback the line that says what went wrong; `txmq dlq show` has all of it.
const lastLine = (text) => text.trim().split("\n").pop();

const letters = (now) => [
  text("Group", (row) => row.group),
  text("Died", (row) => age(now, row.dead_at) + " ago", "short"),
  text("Message", (row) => `${row.topic}/${row.partition}/${row.offset}`, "code"),
  text("Key", (row) => row.key ?? ""),
  count("Attempts", "attempts"),
  text("Error", (row) => row.error_type, "bad"),
  text("Reason", (row) => lastLine(row.reason || row.error_text), "long"),
  text("Fingerprint", (row) => row.fingerprint, "code"),
  count("Parked behind", "parked_behind", "warn"),
];

const still = [
  text("Group", (row) => row.group),
  text("Partition", (row) => `${row.topic}/${row.partition}`, "code"),
  count("Lag", "lag"),
  text("Oldest", (row) => (row.lag_ms ? `${Math.round(row.lag_ms / 1000)} s` : "")),
  text("Members", (row) => row.owners.join(", "), "short"),
  text("Why", (row) => row.why, "long"),
];

async function standing(group) {
  const { value } = await get(`groups/${encodeURIComponent(group)}`);
  const rows = value.positions.filter((row) => row.why);
  return rows.slice(0, STANDING_OF_A_GROUP).map((row) => ({ ...row, group }));
}

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
  const waiting = groups.value.groups.filter((group) => group.lag + group.retrying + group.parked > 0);
  const stands = (await Promise.all(waiting.slice(0, GROUPS_LOOKED_AT).map(({ group }) => standing(group)))).flat();
  drawFacts(broker.value);
  draw("topics", topics.value.topics, TOPICS, "No topics.");
  draw("groups", groups.value.groups, GROUPS, "No consumer groups.");
  draw("standing", stands, still, "All that have something to deliver are moving.");
  draw("transactions", undecided.value.transactions, transactions(broker.now), "Everything is decided.");
  draw("letters", rows, letters(broker.now), "No dead letters.");
}

keepUp(refresh);
