"""The one door into the experience pool: headers, bodies, rewards computed again, copies."""
