"""From public hubs or local files to verified, packed, exactly resumable batches. Nothing is imported here: fetching
must work without torch, and the workers of `ascendchat data prepare` must stay small."""
