# The new house in one go, on a clean checkout: bash lab/house.sh; then the whole suite.
set -e
BIN=${BIN:-.venv/bin}
git rev-parse HEAD > lab/before-house
for step in move merge names wrap; do
  python3 lab/move_house.py lab/house_map.txt $step
  $BIN/ruff check -q --select I,F401 --fix . || true
  $BIN/ruff format -q .
  git add -A
  git commit -qm "The new house: $step"
done
sed -i '/^import difflib$/d' ascendchat/config/__init__.py
sed -i 's/"engine:\(ExportConfig\|ImportNanochatConfig\|ChatConfig\|BenchDecodeConfig\)"/"generate:\1"/; s/"eval:\(EvalBaseConfig\|EvalChatConfig\)"/"generate:\1"/; s/"report.command:ReportConfig"/"commands:ReportConfig"/; s/"speedrun.command:SpeedrunConfig"/"commands:SpeedrunConfig"/' ascendchat/cli.py
sed -i 's/Path(__file__).with_suffix(".json")/Path(__file__).with_name("harmful_env.json")/' ascendchat/device/env.py
git mv -f lab/house_architecture.py tests/test_architecture.py
PYTHONPATH=$PWD $BIN/python lab/house_lists.py "$PWD"  # fills the lists of exceptions
git rm -q lab/house_lists.py lab/house.sh
$BIN/ruff format -q .
git add -A
git commit -qm "The new house: tables of names, files beside modules, and the rules"
$BIN/ruff check .
