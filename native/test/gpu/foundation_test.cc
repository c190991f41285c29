// The parts of the CUDA device that need no GPU: error texts, the choice of GPUs, the search for libraries, and the
// watchdog. Runs on any machine.
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/device.h"
#include "cuda/device/check.h"
#include "cuda/device/dynamic.h"
#include "cuda/device/gpus.h"
#include "cuda/device/health.h"
#include "cuda/device/host_memory.h"
#include "cuda/device/inject.h"
#include "cuda/device/watchdog.h"
#include "cuda/exchange/peers.h"
#include "test/check.h"

namespace refit::cuda {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <typename E, typename F>
std::string message_of(F&& fn) {
  try {
    fn();
  } catch (const E& e) {
    return e.what();
  } catch (...) {
    return "(another exception)";
  }
  return "(no exception)";
}

void test_driver_texts() {
  CHECK(parse_driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:11:06 UTC 2025\n"
                             "GCC version:  gcc version 12.3.0\n") == "580.65.06");
  CHECK(parse_driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build") ==
        "580.95.05");
  CHECK(parse_driver_version("").empty());
  CHECK(parse_driver_version("something else").empty());
  CHECK(cuda_version(13000) == "13.0");
  CHECK(cuda_version(12080) == "12.8");
  CHECK(cuda_version(0).empty());

  CHECK(why_no_gpus(cudaSuccess, 2, 13000, 13000, "580.65.06", nullptr).empty());
  const std::string none = why_no_gpus(cudaErrorInsufficientDriver, 0, 0, 13000, "", nullptr);
  CHECKF(has(none, "no NVIDIA driver") && has(none, "container") && has(none, "580"), "%s", none.c_str());
  const std::string unreachable = why_no_gpus(cudaErrorInsufficientDriver, 0, 0, 13000, "580.65.06", nullptr);
  CHECKF(has(unreachable, "580.65.06") && has(unreachable, "libcuda.so.1"), "%s", unreachable.c_str());
  const std::string old = why_no_gpus(cudaErrorInsufficientDriver, 0, 12080, 13000, "570.124.06", nullptr);
  CHECKF(has(old, "too old") && has(old, "570.124.06") && has(old, "12.8") && has(old, "580") && has(old, "13.0"), "%s",
         old.c_str());
  const std::string hidden = why_no_gpus(cudaErrorNoDevice, 0, 13000, 13000, "580.65.06", "7");
  CHECKF(has(hidden, "CUDA_VISIBLE_DEVICES=\"7\" hides all GPUs"), "%s", hidden.c_str());
  CHECK(has(why_no_gpus(cudaErrorNoDevice, 0, 13000, 13000, "580.65.06", nullptr), "sees no GPU"));
  CHECK(has(why_no_gpus(cudaErrorUnknown, 0, 13000, 13000, "580.65.06", nullptr), "cudaErrorUnknown"));
}

void test_architectures() {
  CHECK(covers("90-real", 9, 0));
  CHECK(!covers("90-real", 10, 0));
  CHECK(!covers("90-real", 8, 0));
  CHECK(covers("80-real", 8, 6));
  CHECK(!covers("86-real", 8, 0));
  CHECK(covers("80-real,90-real,100-real,120", 12, 1));
  CHECK(covers("90", 10, 0));  // by its PTX
  CHECK(covers("90-virtual", 9, 0));
  CHECK(!covers("90-virtual", 8, 9));
  CHECK(!covers("", 9, 0));
  CHECK(describe_architectures("90-real") == "90");
  CHECK(describe_architectures("80-real,90-real,120") == "80, 90, 120, 120 (PTX)");
  const std::string old = message_of<std::invalid_argument>([] { check_capability("Tesla T4", 7, 5); });
  CHECKF(has(old, "Tesla T4") && has(old, "7.5") && has(old, "8.0"), "%s", old.c_str());
}

void test_choose_gpus() {
  CoreConfig config;
  config.ranks = 2;
  CHECK((choose_gpus(config, 4, false) == std::vector<int>{0, 1}));
  const std::string few = message_of<std::invalid_argument>([&] { choose_gpus(config, 1, false); });
  CHECKF(has(few, "2 tensor-parallel ranks") && has(few, "is 1"), "%s", few.c_str());
  CHECK((choose_gpus(config, 1, true) == std::vector<int>{0, 0}));
  config.gpus = {3, 1};
  CHECK((choose_gpus(config, 4, false) == std::vector<int>{3, 1}));
  const std::string absent = message_of<std::invalid_argument>([&] { choose_gpus(config, 3, false); });
  CHECKF(has(absent, "there is no GPU 3") && has(absent, "0 to 2"), "%s", absent.c_str());
  config.gpus = {1, 1};
  CHECK(has(message_of<std::invalid_argument>([&] { choose_gpus(config, 2, false); }), "several ranks"));
  config.share_gpus = true;
  CHECK((choose_gpus(config, 2, false) == std::vector<int>{1, 1}));
  config.gpus = {0};
  CHECK(has(message_of<std::invalid_argument>([&] { choose_gpus(config, 2, false); }), "expected one GPU for each"));
}

void test_libraries() {
  char folder[] = "/tmp/refit-foundation-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const std::string at = folder;
  // Any existing library works; the test is about the search by name.
  Library libm = open_library({"libm.so.6"}, nullptr);
  CHECK(libm.handle != nullptr && symbol(libm, "cos") != nullptr && symbol(libm, "no_such_function") == nullptr);
  CHECK(std::ofstream(at + "/librefit_wanted.so.2") << "not a library");
  setenv("REFIT_CUDA_LIBS", ("/nowhere/at/all:" + at).c_str(), 1);
  const Library broken = open_library({"librefit_wanted.so.2", "librefit_wanted.so.1"}, nullptr);
  CHECK(broken.handle == nullptr && broken.path.empty());
  for (const char* tried : {"/nowhere/at/all/librefit_wanted.so.2", "/nowhere/at/all/librefit_wanted.so.1"}) {
    CHECKF(has(broken.tried, tried), "%s", broken.tried.c_str());
  }
  CHECKF(has(broken.tried, at + "/librefit_wanted.so.2: "), "%s", broken.tried.c_str());
  CHECKF(has(broken.tried, "invalid ELF header") || has(broken.tried, "file too short"), "%s", broken.tried.c_str());
  // A library that is installed later is found; the older name is a substitute for the newer.
  Dl_info info;
  CHECK(dladdr(symbol(libm, "cos"), &info) != 0);
  CHECK(symlink(info.dli_fname, (at + "/librefit_wanted.so.1").c_str()) == 0);
  const Library found = open_library({"librefit_wanted.so.2", "librefit_wanted.so.1"}, nullptr);
  CHECKF(found.handle != nullptr && found.path == at + "/librefit_wanted.so.1", "%s", found.tried.c_str());
  // If a file is named, no other place is searched.
  setenv("REFIT_FOUNDATION_FILE", (at + "/named.so").c_str(), 1);
  const Library named = open_library({"librefit_other.so"}, "REFIT_FOUNDATION_FILE");
  CHECK(named.handle == nullptr && has(named.tried, at + "/named.so") && !has(named.tried, "librefit_other"));
  unsetenv("REFIT_CUDA_LIBS");
  // Packages of a virtual environment.
  setenv("VIRTUAL_ENV", folder, 1);
  const std::string packages = at + "/lib/python3.12/site-packages/nvidia/cu13/lib";
  CHECK(std::system(
            ("mkdir -p " + packages + " && ln -s " + info.dli_fname + " " + packages + "/librefit_pip.so").c_str()) ==
        0);
  const Library pip = open_library({"librefit_pip.so"}, nullptr);
  CHECKF(pip.handle != nullptr && pip.path == packages + "/librefit_pip.so", "%s", pip.tried.c_str());
  unsetenv("VIRTUAL_ENV");
  CHECK(std::system(("rm -r " + at).c_str()) == 0);
}

void test_faults() {
  unsetenv("REFIT_CUDA_FAULT");
  CHECK(fault_from_environment().kind == Fault::Kind::kNone);
  setenv("REFIT_CUDA_FAULT", "illegal:12", 1);
  Fault fault = fault_from_environment();
  CHECK(fault.kind == Fault::Kind::kIllegal && fault.step == 12 && fault.rank == 0);
  setenv("REFIT_CUDA_FAULT", "hang:3:1", 1);
  fault = fault_from_environment();
  CHECK(fault.kind == Fault::Kind::kHang && fault.step == 3 && fault.rank == 1);
  for (const char* bad :
       {"illegal", "illegal:", "illegal:x", "illegal:0", "other:1", "hang:1:", "hang:1:-1", "hang:1:2:3"}) {
    setenv("REFIT_CUDA_FAULT", bad, 1);
    CHECKF(has(message_of<std::invalid_argument>([] { fault_from_environment(); }), "REFIT_CUDA_FAULT"), "%s", bad);
  }
  unsetenv("REFIT_CUDA_FAULT");
}

void test_seconds() {
  unsetenv("REFIT_WATCHDOG_SECONDS");
  CHECK(watchdog_seconds(0) == 60);
  CHECK(watchdog_seconds(2.5) == 2.5);
  setenv("REFIT_WATCHDOG_SECONDS", "7", 1);
  CHECK(watchdog_seconds(0) == 7);
  CHECK(watchdog_seconds(3) == 3);
  for (const char* bad : {"0", "-1", "x", "5s", "inf", "nan"}) {
    setenv("REFIT_WATCHDOG_SECONDS", bad, 1);
    CHECK_THROWS(watchdog_seconds(0), std::invalid_argument);
  }
  unsetenv("REFIT_WATCHDOG_SECONDS");
}

void test_watchdog_runs() {
  auto health = std::make_shared<Health>();
  Watchdog dog(health, 0.2);
  for (int i = 0; i < 1000; i++) {
    const auto out = std::make_shared<int>(0);
    dog.run([out, i] { *out = i; });
    CHECK(*out == i);
  }
  CHECK(message_of<std::out_of_range>([&] { dog.run([] { throw std::out_of_range("as thrown"); }); }) == "as thrown");
  // Slow, but not in a GPU: a disk may take its time.
  auto activity = health->add("rank 0");
  dog.run([activity] {
    activity->begin("read a file", false);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    activity->end();
  });
  // Slow, but it makes progress.
  dog.run([activity] {
    for (int i = 0; i < 10; i++) {
      activity->begin("copy");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    activity->end();
  });
  CHECK(!health->lost());
}

void test_watchdog_gives_up() {
  auto health = std::make_shared<Health>();
  Watchdog dog(health, 0.3);
  const auto one = health->add("rank 0 (GPU 0)"), two = health->add("rank 1 (GPU 1)");
  two->set_where([] { return std::string("between layers.1.qkv and layers.1.down"); });
  // The thread outlives the watchdog, so it shares what it uses.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool go_on = false, went_on = false;
  };
  const auto shared = std::make_shared<Shared>();
  const std::string message = message_of<DeviceLost>([&] {
    dog.run([=] {
      two->begin("wait for the step");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      one->begin("wait for the step");
      std::unique_lock lock(shared->mutex);
      shared->changed.wait(lock, [&] { return shared->go_on; });
      shared->went_on = true;
      shared->changed.notify_all();
    });
  });
  CHECKF(
      has(message, "rank 1 (GPU 1) has been stuck in wait for the step, between layers.1.qkv and layers.1.down, for"),
      "%s", message.c_str());
  CHECK(health->lost());
  // From now on everything fails at once with the same message.
  CHECK(message_of<DeviceLost>([&] { dog.run([] {}); }) == message);
  std::unique_lock lock(shared->mutex);
  shared->go_on = true;
  shared->changed.notify_all();
  shared->changed.wait(lock, [&] { return shared->went_on; });
}

void test_watchdog_hears_of_a_loss() {
  auto health = std::make_shared<Health>();
  Watchdog dog(health, 1000);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  // One rank is lost while another waits for it: the caller gets the error at once.
  const std::string message = message_of<DeviceLost>([&] {
    dog.run([health, until] {
      health->lose("rank 1 is lost");
      std::this_thread::sleep_until(until);
    });
  });
  CHECK(message == "rank 1 is lost");
  CHECK(std::chrono::steady_clock::now() < until);
  std::this_thread::sleep_until(until + std::chrono::milliseconds(50));
}

void test_watchdog_knows_errors_for_good() {
  auto health = std::make_shared<Health>();
  Watchdog dog(health, 1000);
  CHECK_THROWS(dog.run([] { throw CudaError(cudaErrorInvalidValue, "a copy"); }), CudaError);
  CHECK(!health->lost());
  const std::string message =
      message_of<DeviceLost>([&] { dog.run([] { throw CudaError(cudaErrorECCUncorrectable, "a copy"); }); });
  CHECKF(has(message, "a copy: cudaErrorECCUncorrectable"), "%s", message.c_str());
  CHECK(health->lost());
}

void test_start_has_patience() {
  auto health = std::make_shared<Health>();
  Watchdog dog(health, 0.05);
  const auto activity = health->add("rank 0");
  dog.run(
      [activity] {
        activity->begin("start");
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        activity->end();
      },
      10);
  CHECK(!health->lost());
}

}  // namespace
}  // namespace refit::cuda

int main() {
  using namespace refit::cuda;
  test_driver_texts();
  test_architectures();
  test_choose_gpus();
  test_libraries();
  test_faults();
  test_seconds();
  test_watchdog_runs();
  test_watchdog_gives_up();
  test_watchdog_hears_of_a_loss();
  test_watchdog_knows_errors_for_good();
  test_start_has_patience();
  CHECK(available_host_bytes() > (uint64_t{1} << 20) && available_host_bytes() < (uint64_t{1} << 50));
  return refit::test::finish("foundation_test");
}
