"""Private swarms: who is a member, the keys that members share, and a transport that encrypts all that leaves a node."""
