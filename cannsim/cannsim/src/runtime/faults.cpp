// Fault injection: CANNSIM_FAULT="name:nth:action[@rank],..."
//
//   name    a function (aclnnMatmul, HcclAllReduce, aclrtMalloc...); a trailing * matches any ending
//   nth     which call of that function in this process, 1 = the first
//   action  an error code, or `hang`, or `kill` (SIGKILL)
//   @rank   only in the process with that RANK
//
// Errors of the device itself (507xxx) in a queued function appear where hardware shows them: later,
// at the next synchronisation. All other codes are returned by the call.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace cannsim {

namespace {

enum class Action { kCode, kHang, kKill };

struct Rule {
  std::string name;
  bool prefix;        // name ended with *
  uint64_t nth;
  Action action;
  int code;
  bool late;          // added while the process runs, so its calls count from then on
  std::atomic<uint64_t> seen{0};  // calls that matched; differs from nth_call only for prefix and late rules
};

[[noreturn]] void bad_rule(const std::string& text) {
  fprintf(stderr,
          "cannsim: CANNSIM_FAULT: cannot read '%s'; expected name:nth:action[@rank], action = error code, hang or "
          "kill\n",
          text.c_str());
  _exit(2);
}

// -1 when it is no number.
long whole_number(const std::string& text) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return -1;
  return atol(text.c_str());
}

// Null when the rule is for another rank.
std::unique_ptr<Rule> parse_rule(std::string text) {
  const std::string whole = text;
  bool elsewhere = false;
  if (size_t at = text.find('@'); at != std::string::npos) {
    long wanted = whole_number(text.substr(at + 1));
    if (wanted < 0) bad_rule(whole);
    elsewhere = wanted != rank();
    text.resize(at);
  }
  size_t first = text.find(':'), second = text.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos || first == 0) bad_rule(whole);
  auto rule = std::make_unique<Rule>();
  rule->name = text.substr(0, first);
  rule->prefix = rule->name.back() == '*';
  if (rule->prefix) rule->name.pop_back();
  long nth = whole_number(text.substr(first + 1, second - first - 1));
  std::string action = text.substr(second + 1);
  if (nth < 1) bad_rule(whole);
  rule->nth = uint64_t(nth);
  rule->code = int(whole_number(action));
  rule->action = action == "hang" ? Action::kHang : action == "kill" ? Action::kKill : Action::kCode;
  if (rule->action == Action::kCode && rule->code < 1) bad_rule(whole);
  if (elsewhere) return nullptr;
  return rule;
}

using Rules = std::vector<std::unique_ptr<Rule>>;

Rules* parse_rules(const std::string& text, bool late) {
  auto* list = new Rules;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) {
      if (auto rule = parse_rule(text.substr(begin, end - begin))) {
        rule->late = late;
        list->push_back(std::move(rule));
      }
    }
    begin = end + 1;
  }
  return list;
}

// Replaced as a whole; the old rules are leaked, since another thread may be reading them.
std::atomic<const Rules*>& rules() {
  static std::atomic<const Rules*> current{parse_rules(env_string("CANNSIM_FAULT", ""), false)};
  return current;
}

bool starts_with(const char* text, const char* prefix) { return strncmp(text, prefix, strlen(prefix)) == 0; }

// Functions whose work is done later by the stream: operators and collectives.
bool is_queued(const char* name) {
  static const char* const kCollectives[] = {"HcclAllReduce", "HcclAllGather", "HcclReduceScatter", "HcclBroadcast",
                                             "HcclReduce",    "HcclScatter",   "HcclAlltoAll",      "HcclSend",
                                             "HcclRecv",      "HcclBarrier",   "HcclBatchSendRecv"};
  if (starts_with(name, "aclnn")) return true;
  for (const char* collective : kCollectives) {
    if (starts_with(name, collective)) return true;
  }
  return false;
}

thread_local PendingFault t_pending;
thread_local const char* t_pending_name = nullptr;

void arm(const char* name, Fault fault, int code) {
  t_pending = {fault, code};
  t_pending_name = name;
}

}  // namespace

void hang_forever() {
  for (;;) pause();
}

int apply_faults(const char* name, uint64_t nth_call) {
  for (const auto& rule : *rules().load()) {
    uint64_t nth = nth_call;
    if (rule->prefix ? !starts_with(name, rule->name.c_str()) : rule->name != name) continue;
    if (rule->prefix || rule->late) nth = ++rule->seen;
    if (nth != rule->nth) continue;
    if (rule->action == Action::kKill) raise(SIGKILL);
    if (rule->action == Action::kHang) {
      if (!is_queued(name)) hang_forever();
      arm(name, Fault::kHang, 0);
      return 0;
    }
    if (is_queued(name) && rule->code >= 507000 && rule->code < 508000) {
      arm(name, Fault::kFail, rule->code);
      return 0;
    }
    set_error(describe_error(rule->code, name));
    return rule->code;
  }
  return 0;
}

PendingFault take_pending_fault(const char* name) {
  if (t_pending.fault == Fault::kNone || strcmp(t_pending_name, name) != 0) return {};
  PendingFault taken = t_pending;
  t_pending = {};
  return taken;
}

}  // namespace cannsim

// For Python (ctypes): from now on these rules and no others; "" takes all away.
API void cannsim_set_faults(const char* text) { cannsim::rules() = cannsim::parse_rules(text, true); }
