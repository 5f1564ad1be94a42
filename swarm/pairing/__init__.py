"""A partner to merge adapters with, found without a coordinator, and the exchange of the two adapters. Knows no tensor."""
