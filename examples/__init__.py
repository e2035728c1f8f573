"""Programs that show how txmq is used."""
