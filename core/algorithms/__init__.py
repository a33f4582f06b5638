"""From recorded episodes to training rows: groups, rewards, advantages, and the recipes that configure them."""
