#pragma once
#include <pthread.h>
#include <signal.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>

namespace refit {

// A named thread that receives no signal of the process: signals belong to the host program's threads.
inline std::thread quiet_thread(const std::string& name, std::function<void()> fn) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(fn));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

}  // namespace refit
