"""The posterior head: a contrastive network that reads the posterior over a gallery from one call per query."""
