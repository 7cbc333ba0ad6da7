"""The command server that is pid 1 of a sandbox, and the frames it speaks.

The server is a short Perl program: Perl starts in a third of the time of Python, is part of every Debian, and can fork,
poll and kill without one helper process. It must withstand the commands it runs, which have its own uid:

* as pid 1 of the pid namespace it can't be killed or stopped from inside;
* it is not dumpable, so ``/proc/1/{mem,fd,environ}`` are closed to the commands (seccomp denies ptrace and its kin);
* its only channel to the host is a SOCK_SEQPACKET socket that no command inherits or can reopen, so a command can
  neither read nor forge a frame; each command writes to a pipe of its own.

Where the channel can only be a stream (a container's standard input and output, :data:`STREAM`), each frame follows its
length (4 bytes), commands get other descriptors for 0, 1 and 2, and the server ends by itself at its deadline.

Frames are whole packets, at most ``MAX_FRAME`` bytes, the first byte is the kind. Host to server:
``X`` run, ``K`` stop the running command, ``W`` write files, ``A`` append to files, ``G`` get a file.
Server to host: ``R`` ready, ``O`` output, ``E`` end of a command, ``w`` written, ``d`` data of a file, ``g`` end of it.
Text before ``R`` comes from ``bwrap``; ``L`` and ``X`` come from the launcher: all is set up, all is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MAX_FRAME = 128 << 10
_LONGEST_S = 4_000_000.0  # what the frame can hold, in milliseconds
_PIECE = 96 << 10  # bytes of file content in one frame

SCRIPT = "/etc/command-server.pl"  # where the sandbox has SERVER

# prctl, getrusage, clock_gettime, prlimit64: Perl has no names for them, and they differ by machine
SYSCALLS: Mapping[str, tuple[int, int, int, int]] = {
    "x86_64": (157, 98, 228, 302),
    "aarch64": (167, 165, 113, 261),
}

# The first argument of the server: what its channel is. PACKETS: a SOCK_SEQPACKET socket at descriptor 0.
PACKETS, STREAM = 0, 1

# argv: channel, seconds to live (0: no limit), prctl getrusage clock_gettime prlimit64, then pairs "resource limit"
SERVER = r"""
my ($STREAM, $LIFE, $PRCTL, $GETRUSAGE, $CLOCK, $PRLIMIT, @limits) = map { $_ + 0 } @ARGV;
my ($PIDFD_OPEN, $CLOSE_RANGE, $CAPACITY) = (434, 436, 61440);
syscall($CLOSE_RANGE, 3, 0x7fffffff, 0);    # nothing of the host's is handed on, whatever leaked in
syscall($PRCTL, 4, 0, 0, 0, 0) == 0 or die "farm: prctl: $!\n";
while (@limits) {
    my ($resource, $value) = splice(@limits, 0, 2);
    my $pair = pack('Q2', $value, $value);
    syscall($PRLIMIT, 0, $resource, $pair, 0) == 0 or die "farm: prlimit $resource: $!\n";
}
$SIG{PIPE} = 'IGNORE';
umask(022);

open(my $host, $STREAM ? '<&=' : '+<&=', 0) or die "farm: channel: $!\n";
my $back;
if ($STREAM) { open($back, '>&', 1) or die "farm: channel: $!\n" }
else { $back = $host }
if ($LIFE) { $SIG{ALRM} = sub { exit(0) }; alarm($LIFE) }

sub answer {
    my $frame = $STREAM ? pack('N', length($_[0])) . $_[0] : $_[0];
    my $at = 0;
    while ($at < length($frame)) {
        my $n = syswrite($back, $frame, length($frame) - $at, $at);
        if (defined $n) { $at += $n }
        elsif ($! != 4) { exit(1) }    # EINTR
    }
}

sub piece {
    my ($size) = @_;
    my $data = '';
    while (length($data) < $size) {
        my $n = sysread($host, $data, $size - length($data), length($data));
        return undef if defined $n ? !$n : $! != 4;
    }
    return $data;
}

sub hear {    # the next frame; undef when the host is gone
    if ($STREAM) {
        my $size = piece(4);
        return defined $size ? piece(unpack('N', $size)) : undef;
    }
    my $n = sysread($host, my $frame, 262144);
    return $n ? $frame : undef;
}

sub now {
    my $time = pack('q2', 0, 0);
    syscall($CLOCK, 1, $time);
    my ($s, $ns) = unpack('q2', $time);
    return $s + $ns / 1e9;
}

sub cpu_us {
    my $total = 0;
    for my $who (0, -1) {
        my $usage = pack('q18', (0) x 18);
        syscall($GETRUSAGE, $who, $usage);
        my ($us, $uu, $ss, $su) = unpack('q4', $usage);
        $total += ($us + $ss) * 1000000 + $uu + $su;
    }
    return $total;
}

sub reap { 1 while waitpid(-1, 1) > 0 }

sub kill_all {
    kill('KILL', -1);    # all but this process
    my $grace = now() + 2;
    while (now() < $grace) {
        my $gone = waitpid(-1, 1);
        last if $gone == -1;
        select(undef, undef, undef, 0.001) if $gone == 0;
    }
}

sub child {
    my ($write, $command, $cwd, %env) = @_;
    $SIG{PIPE} = 'DEFAULT';
    open(STDIN, '<', '/dev/null');
    open(STDOUT, '>&', $write);
    open(STDERR, '>&', $write);
    if (syscall($PRCTL, 4, 1, 0, 0, 0) == 0 && open(my $score, '>', '/proc/self/oom_score_adj')) {
        syswrite($score, '500');
        close($score);
    }
    setpgrp(0, 0);
    if (!chdir($cwd)) { syswrite(STDERR, "cd: $cwd: $!\n"); exit(126) }
    $ENV{PWD} = $cwd;
    $ENV{$_} = $env{$_} for keys %env;
    exec {'/bin/bash'} 'bash', '-c', $command or syswrite(STDERR, "bash: $!\n");
    exit(126);
}

sub run {
    my ($ms, $room, $command, $cwd, @env) = @_;
    reap();
    pipe(my $read, my $write) or exit(1);
    my $pid = fork;
    if (!defined $pid) {    # left-over processes have used up the sandbox's pids
        kill_all();
        $pid = fork;
        defined $pid or exit(1);
    }
    child($write, $command, $cwd, @env) if $pid == 0;
    close($write);
    my $fd = syscall($PIDFD_OPEN, $pid, 0);
    $fd >= 0 or exit(1);
    open(my $life, '<&=', $fd) or exit(1);
    my $pipe = fileno($read);
    fcntl($read, 4, 2048);    # F_SETFL, O_NONBLOCK
    my ($deadline, $out, $cut, $late, $open) = (now() + $ms / 1000, '', 0, 0, 1);

    my $take = sub {    # true when there may be more
        my $n = sysread($read, my $data, 65536);
        return $! == 11 ? 0 : ($open = 0) if !defined $n;    # EAGAIN
        return $open = 0 if !$n;
        if ($n > $room) { $cut = 1; $data = substr($data, 0, $room) }
        $room -= length($data);
        $out .= $data;
        while (length($out) >= $CAPACITY) { answer('O' . substr($out, 0, $CAPACITY, '')) }
        return 1;
    };

    while (1) {
        my $left = $deadline - now();
        if ($left <= 0) { $late = 1; last }
        my $ready = '';
        vec($ready, 0, 1) = 1;
        vec($ready, $fd, 1) = 1;
        vec($ready, $pipe, 1) = 1 if $open;
        next if select($ready, undef, undef, $left) <= 0;
        if (vec($ready, 0, 1)) {
            defined hear() or exit(0);
            $late = 1;
            last;
        }
        $take->() if $open && vec($ready, $pipe, 1);
        last if vec($ready, $fd, 1);
    }
    my $code = 124;
    if ($late) { kill_all() }
    else { waitpid($pid, 0); $code = $? & 127 ? 128 + ($? & 127) : $? >> 8 }
    for (1 .. 64) { last if !$open || !$take->() }    # what was written before the end; bounded: others may still write
    reap();
    answer('E' . pack('NCCQ>', $code, $cut, $late, cpu_us()) . $out);
}

sub parents {
    my ($path) = @_;
    my $at = 0;
    while (($at = index($path, '/', $at + 1)) > 0) { mkdir(substr($path, 0, $at), 0755) }
}

sub put {
    my ($mode, @files) = @_;
    my $problem = '';
    while (@files) {
        my $path = shift @files;
        my $data = shift @files;
        my $file;
        if (!open($file, $mode, $path)) {
            parents($path);
            if (!open($file, $mode, $path)) { $problem = "$path: $!"; last }
        }
        my $at = 0;
        while ($at < length($data)) {
            my $n = syswrite($file, $data, length($data) - $at, $at);
            if (!defined $n) { $problem = "$path: $!"; last }
            $at += $n;
        }
        close($file);
        last if $problem ne '';
    }
    answer("w$problem");
}

sub get {
    my ($most, $path) = @_;
    my $file;
    if (!sysopen($file, $path, 2048) || !-f $file) { answer('gmissing') }    # O_NONBLOCK: a fifo must not hang us
    else {
        my $n;
        while ($most >= 0 && ($n = sysread($file, my $data, $most < $CAPACITY ? $most + 1 : $CAPACITY))) {
            $most -= $n;
            answer("d$data");
        }
        answer($most < 0 ? 'gbig' : defined $n ? 'gok' : 'gmissing');
    }
}

open(STDOUT, '>', '/dev/null');
open(STDERR, '>', '/dev/null');
answer('R' . pack('Q>', cpu_us()));
while (defined(my $frame = hear())) {
    my $kind = substr($frame, 0, 1, '');
    if ($kind eq 'X') { run(unpack('N2 (N/a)*', $frame)) }
    elsif ($kind eq 'W') { put('>', unpack('(N/a)*', $frame)) }
    elsif ($kind eq 'A') { put('>>', unpack('(N/a)*', $frame)) }
    elsif ($kind eq 'G') { get(unpack('N N/a', $frame)) }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a command ended; ``output`` comes after that of the ``O`` frames, ``cpu_s`` is all CPU seconds so far."""

    exit_code: int
    truncated: bool
    timed_out: bool
    cpu_s: float
    output: bytes


def server_argv(machine: str, limits: Sequence[tuple[int, int]]) -> list[str]:
    """Command line of the server on packets; ``limits`` are (resource, value) pairs for ``prlimit``.

    Raises ``KeyError`` for a machine type that is not in ``SYSCALLS``.
    """
    return _argv(machine, limits, channel=PACKETS, life_s=0, script=(SCRIPT,))


def stream_argv(machine: str, limits: Sequence[tuple[int, int]], *, life_s: int) -> list[str]:
    """Command line of the server on standard input and output, for a root that has perl but not the script. It ends,
    and with it its pid namespace, after ``life_s`` seconds. Raises ``KeyError`` like :func:`server_argv`."""
    return _argv(machine, limits, channel=STREAM, life_s=max(1, life_s), script=("-e", SERVER, "--"))


def _argv(
    machine: str, limits: Sequence[tuple[int, int]], *, channel: int, life_s: int, script: Sequence[str]
) -> list[str]:
    numbers = [channel, life_s, *SYSCALLS[machine], *(n for pair in limits for n in pair)]
    return ["/usr/bin/perl", *script, *map(str, numbers)]


def run_frame(command: bytes, *, timeout_s: float, output_bytes: int, cwd: str, env: Mapping[str, str]) -> bytes:
    fields = [command, cwd.encode(), *(text.encode() for item in env.items() for text in item)]
    return b"X" + struct.pack(">II", max(1, int(min(timeout_s, _LONGEST_S) * 1000)), output_bytes) + _packed(fields)


def stop_frame() -> bytes:
    return b"K"


def get_frame(path: str, max_bytes: int) -> bytes:
    return b"G" + struct.pack(">I", max_bytes) + _packed([path.encode()])


def write_frames(files: Mapping[str, bytes]) -> Iterator[bytes]:
    """Frames that write ``files`` in order, small files together, large ones in pieces."""
    batch: list[bytes] = []
    size = 0
    for path, data in files.items():
        name = path.encode()
        if batch and size + len(name) + min(len(data), _PIECE) > _PIECE:
            yield b"W" + b"".join(batch)
            batch, size = [], 0
        batch.append(_packed([name, data[:_PIECE]]))
        size += len(batch[-1])
        if len(data) > _PIECE:
            yield b"W" + b"".join(batch)
            batch, size = [], 0
            for at in range(_PIECE, len(data), _PIECE):
                yield b"A" + _packed([name, data[at : at + _PIECE]])
    if batch:
        yield b"W" + b"".join(batch)


def parse_ready(frame: bytes) -> float | None:
    """CPU seconds of the start, when ``frame`` says that the server is ready."""
    return int.from_bytes(frame[1:], "big") / 1e6 if frame[:1] == b"R" and len(frame) == 9 else None


def parse_end(frame: bytes) -> End:
    code, cut, late, cpu_us = struct.unpack_from(">IBBQ", frame, 1)
    return End(exit_code=code, truncated=bool(cut), timed_out=bool(late), cpu_s=cpu_us / 1e6, output=frame[15:])


def _packed(fields: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack(">I", len(field)) + field for field in fields)
