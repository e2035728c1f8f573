"""The page of the nodes that share the log."""

from __future__ import annotations

from txmq.admin.console.page import Page, PageRequest, View


async def cluster(request: PageRequest) -> View:
    """List the nodes, and let another one lead."""
    shown = await request.ask("cluster.describe")
    nodes = shown["nodes"]
    is_alone = (await request.ask("broker.settings"))["settings"]["cluster"] is None
    followers = [node for node in nodes if node["role"] == "follower"]
    return View("cluster.html", {"shown": shown, "is_alone": is_alone, "followers": followers})


PAGES = (Page("cluster", "Cluster", cluster, "Cluster", "c"),)
