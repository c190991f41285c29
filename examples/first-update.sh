#!/usr/bin/env bash
# A first update, on the models that come with refit. In another terminal: npm start
set -euo pipefail
url=${1:-http://127.0.0.1:30000}

ask () { # path, body
  curl -fsS "$url$1" -H 'content-type: application/json' -d "$2"
  echo
}
sums='{
  "text": ["123+456=", "787+145=", "999+999=", "305+48=", "664+277="],
  "sampling_params": {"temperature": 0, "max_new_tokens": 8}
}'
answers () { ask /generate "$sums" | grep -o '"text":"[^"]*"' | tr '\n' ' '; echo; }

echo 'The base model guesses:       (579 932 1998 353 941 are right)'
answers
ask /update_weights_from_disk '{"model_path": "models/adder", "weight_version": "trained"}'
echo 'The same server after the update:'
answers
curl -fsS "$url/get_weight_version"
echo
