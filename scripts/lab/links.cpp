// The links of a lab whose packets take time, in user space: for kernels without netem.
//   links LAB DELAY UP DOWN HOSTS      (netlab.sh starts it)
// DELAY: one way, in ms. UP, DOWN: rates of a host in bit/s, 0 for no limit.
//
// Host i is the network namespace LABhost<i>, and gets eth0 with 10.77.0.(i+1)/24. A packet leaves
// its host at the rate UP, arrives DELAY later, and enters the other host at the rate DOWN. Ends
// when a namespace is removed. Lines on stdin: "cut 2": host 2 loses all packets; "mend 2".
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Bytes = std::vector<unsigned char>;

// Linux's virtio_net_hdr, before each packet: <linux/virtio_net.h> is not C++.
struct Header {
  uint8_t flags, segmented;
  uint16_t headers, segment, checksum_start, checksum_offset;  // bytes
};

struct Host {
  int file = -1;
  bool cut = false;
  Time sent, received;  // when its last packet has left it, and when the last one has entered it
  std::multimap<Time, Bytes> packets;  // on their way to it, by arrival
  size_t queued = 0;                   // their bytes
};

// The namespace gets the device, and this process keeps its file. Packets of up to 64 KB pass with
// the segments that the kernel would make of them (TSO), which takes a tenth of the time.
int open_link(const std::string& lab, int number) {
  const std::string host = lab + "host" + std::to_string(number),
                    link = lab + "tun" + std::to_string(number);
  const int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  link.copy(request.ifr_name, IFNAMSIZ - 1);
  if (file < 0 || ioctl(file, TUNSETIFF, &request) < 0) return -1;
  ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4);
  const std::string inside = "ip -n " + host + " ";
  const std::string address = "10.77.0." + std::to_string(number + 1) + "/24";
  const std::string commands = "ip link set " + link + " netns " + host + " name eth0 && " +
                               inside + "addr add " + address + " dev eth0 && " + inside +
                               "link set eth0 up txqueuelen 10000";
  return std::system(commands.c_str()) ? -1 : file;
}

// The bytes on the wire: each segment of a packet has headers of its own.
size_t wire_bytes(const Bytes& data) {
  Header header;
  std::memcpy(&header, data.data(), sizeof header);
  const size_t length = data.size() - sizeof header;
  if (!header.segmented || header.headers >= length) return length;
  const size_t segments = (length - header.headers + header.segment - 1) / header.segment;
  return length + (segments - 1) * header.headers;
}

void obey(std::vector<Host>& hosts) {
  char line[256];
  const ssize_t length = read(STDIN_FILENO, line, sizeof line - 1);
  if (length <= 0) return;
  line[length] = 0;
  char verb[8];
  unsigned number;
  if (std::sscanf(line, "%7s %u", verb, &number) == 2 && number < hosts.size())
    hosts[number].cut = std::string_view(verb) == "cut";
}

}  // namespace

int main(int count, char** words) {
  if (count != 6) return std::fprintf(stderr, "links LAB DELAY UP DOWN HOSTS\n"), 2;
  const std::string lab = words[1];
  using Nanoseconds = std::chrono::duration<double, std::nano>;
  const auto lasts = [](size_t bytes, double rate) {
    return std::chrono::duration_cast<Clock::duration>(Nanoseconds(rate ? 8e9 * bytes / rate : 0));
  };
  const auto delay =
      std::chrono::duration_cast<Clock::duration>(Nanoseconds(std::atof(words[2]) * 1e6));
  const double up = std::atof(words[3]), down = std::atof(words[4]);
  std::vector<Host> hosts(std::atoi(words[5]));
  std::vector<pollfd> files;
  for (size_t i = 0; i < hosts.size(); i++) {
    hosts[i].file = open_link(lab, i);
    if (hosts[i].file < 0) return std::perror((lab + "host" + std::to_string(i)).c_str()), 1;
    files.push_back({hosts[i].file, POLLIN, 0});
  }
  files.push_back({STDIN_FILENO, POLLIN, 0});
  prctl(PR_SET_TIMERSLACK, 1);
  std::puts("ready");
  std::fflush(stdout);
  std::fclose(stdout);
  // A router's queue: of two delays and 200 ms.
  const double slowest = up && down ? std::min(up, down) : std::max(up, down);
  const size_t limit =
      slowest
          ? std::max<size_t>(slowest / 8 * (2 * Nanoseconds(delay).count() / 1e9 + 0.2), 1 << 18)
          : -1;
  Bytes buffer(70000);
  for (;;) {
    Time next = Time::max();
    for (Host& host : hosts) {
      const Time now = Clock::now();
      while (!host.packets.empty()) {
        const auto& [arrives, data] = *host.packets.begin();
        const Time due = std::max(arrives, host.received + lasts(wire_bytes(data), down));
        if (due > now) {
          next = std::min(next, due);
          break;
        }
        if (!host.cut && write(host.file, data.data(), data.size()) < 0 && errno == EAGAIN) {
          next = std::min(next, now + std::chrono::milliseconds(1));
          break;
        }
        host.received = due;
        host.queued -= data.size();
        host.packets.erase(host.packets.begin());
      }
    }
    timespec wait{};
    if (next != Time::max()) {
      const long left = std::max<long>(0, std::chrono::nanoseconds(next - Clock::now()).count());
      wait = {left / 1'000'000'000, left % 1'000'000'000};
    }
    if (ppoll(files.data(), files.size(), next == Time::max() ? nullptr : &wait, nullptr) < 0)
      continue;
    if (files.back().revents & POLLIN) obey(hosts);
    for (size_t i = 0; i < hosts.size(); i++) {
      if (files[i].revents & (POLLERR | POLLNVAL)) return 0;
      for (int burst = 0; files[i].revents & POLLIN && burst < 64; burst++) {
        const ssize_t length = read(hosts[i].file, buffer.data(), buffer.size());
        if (length < 0 && errno != EAGAIN) return 0;
        const unsigned char* packet = buffer.data() + sizeof(Header);
        if (length < ssize_t(sizeof(Header)) + 20) break;
        const size_t to = packet[19] - 1;  // 10.77.0.(to + 1)
        const bool known =
            packet[0] >> 4 == 4 && packet[16] == 10 && packet[17] == 77 && packet[18] == 0;
        if (!known || to >= hosts.size() || hosts[i].cut || hosts[to].cut) continue;
        Host &from = hosts[i], &host = hosts[to];
        if (host.queued + length > limit) continue;
        Bytes data(buffer.data(), buffer.data() + length);
        from.sent = std::max(from.sent, Clock::now()) + lasts(wire_bytes(data), up);
        host.packets.emplace(from.sent + delay, std::move(data));
        host.queued += length;
      }
    }
  }
}
