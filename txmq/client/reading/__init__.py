"""Reading without a group: nothing is leased or acked, readers keep positions of their own."""
