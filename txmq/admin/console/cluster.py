"""The page of the nodes that share the log, and of logs that have topics in common."""

from __future__ import annotations

from txmq.admin.console.page import Page, PageRequest, View


async def cluster(request: PageRequest) -> View:
    """List the nodes, and let another one lead. List the logs; their list is changed by
    commands, which copy it to each of them.
    """
    shown = await request.ask("cluster.describe")
    nodes = shown["nodes"]
    is_alone = (await request.ask("broker.settings"))["settings"]["cluster"] is None
    followers = [node for node in nodes if node["role"] == "follower"]
    values = {"shown": shown, "logs": shown["logs"]["logs"]}
    return View("cluster.html", {**values, "is_alone": is_alone, "followers": followers})


PAGES = (Page("cluster", "Cluster", cluster, "Cluster", "c", needs="cluster.describe"),)
