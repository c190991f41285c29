#include "cuda/device/health.h"

#include <algorithm>
#include <cstdio>

namespace refit::cuda {

double Activity::seconds() const {
  const int64_t at = began.load(std::memory_order_acquire);
  if (at == 0) return 0;
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::duration(std::max<int64_t>(0, now() - at))).count();
}

std::string Activity::label() const {
  const std::lock_guard lock(mutex_);
  return label_;
}

void Activity::rename(std::string name) {
  const std::lock_guard lock(mutex_);
  label_ = std::move(name);
}

void Activity::set_where(std::function<std::string()> where) {
  const std::lock_guard lock(mutex_);
  where_ = std::move(where);
}

std::string Activity::where() const {
  const std::lock_guard lock(mutex_);
  return where_ ? where_() : std::string();
}

void Health::lose(const std::string& message) {
  {
    const std::lock_guard lock(mutex_);
    if (lost_) return;
    lost_ = true;
    message_ = message;
  }
  changed_.notify_all();
}

bool Health::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

std::string Health::message() const {
  const std::lock_guard lock(mutex_);
  return message_;
}

void Health::note(const std::string& message) {
  const std::lock_guard lock(mutex_);
  note_ = message;
}

std::shared_ptr<Activity> Health::add(const std::string& label) {
  auto activity = std::make_shared<Activity>(label);
  const std::lock_guard lock(mutex_);
  activities_.push_back(activity);
  return activity;
}

std::string Health::stuck(double seconds) const {
  std::vector<std::shared_ptr<Activity>> all;
  std::string note;
  {
    const std::lock_guard lock(mutex_);
    all = activities_;
    note = note_;
  }
  const Activity* worst = nullptr;
  double longest = seconds;
  for (const auto& activity : all) {
    const double in = activity->seconds();
    if (in > longest) {
      longest = in;
      worst = activity.get();
    }
  }
  if (worst == nullptr) return "";
  const std::string where = worst->where();
  char time[32];
  std::snprintf(time, sizeof time, "%.3g", longest);
  std::string text = worst->label() + " has been stuck in " + worst->operation.load(std::memory_order_relaxed) +
                     (where.empty() ? "" : ", " + where + ",") + " for " + time + " s";
  // Ranks that wait for it in a collective are stuck too, and began to wait at about the same time.
  std::string others;
  for (const auto& activity : all) {
    if (activity.get() == worst || activity->seconds() < seconds / 2) continue;
    const std::string there = activity->where();
    others += (others.empty() ? "" : ", ") + activity->label() + (there.empty() ? "" : " " + there);
  }
  if (!others.empty()) text += "; with it " + others;
  if (!note.empty()) text += "; before that: " + note;
  return text;
}

bool Health::wait(double seconds, const std::function<bool()>& done) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return lost_ || done(); });
}

void Health::finish(const std::function<void()>& set) {
  {
    const std::lock_guard lock(mutex_);
    set();
  }
  changed_.notify_all();
}

}  // namespace refit::cuda
