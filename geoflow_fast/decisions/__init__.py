"""From the scores of any search to decisions: how far to trust a result list, and rules with a guaranteed error."""
