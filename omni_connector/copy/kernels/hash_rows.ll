; clang 19, sha256 of the C 4fa3d5cd3c057516
; scripts/compile_kernels.py has made this file.

@FIRST_SUMS = internal unnamed_addr constant [8 x i64] [i64 3266489917, i64 -7046029288634856825, i64 -4417276706812531889, i64 1609587929392839161, i64 -8796714831421723037, i64 2246822519, i64 2870177450012600261, i64 2654435761], align 16
@SECRET = internal unnamed_addr constant [192 x i8] c"\B8\FEl9#\A4K\BE|\01\81,\F7!\AD\1C\DE\D4m\E9\83\90\97\DBr@\A4\A4\B7\B3g\1F\CBy\E6N\CC\C0\E5x\82Z\D0}\CC\FFr!\B8\08Ft\F7C$\8E\E05\90\E6\81:&L<(R\BB\91\C3\00\CB\88\D0e\8B\1BS.\A3qdH\97\A2\0D\F9N8\19\EFF\A9\DE\AC\D8\A8\FAv?\E3\9C4?\F9\DC\BB\C7\C7\0BO\1D\8AQ\E0K\CD\B4Y1\C8\9F~\C9\D9xsd\EA\C5\AC\834\D3\EB\C3\C5\81\A0\FF\FA\13c\EB\17\0D\DDQ\B7\F0\DAI\D3\16U&)\D4h\9E+\16\BEX}G\A1\FC\8F\F8\B8\D1z\D01\CEE\CB:\8F\95\16\04(\AF\D7\FB\CA\BBK@~", align 8

define void @block_sums(ptr %rows, i32 %count, i64 %bytes, i32 %before, i32 %more, ptr %sums) {
entry:
  %conv.i = zext i32 %before to i64
  %div4.i = lshr i64 %bytes, 6
  %add.i = add i64 %div4.i, %conv.i
  %tobool.not.i = icmp eq i32 %more, 0
  %conv1.neg.i = sext i1 %tobool.not.i to i64
  %sub.i = add i64 %add.i, %conv1.neg.i
  %div25.i = lshr i64 %sub.i, 4
  %conv3.i = trunc i64 %div25.i to i32
  %mul = shl i32 %count, 3
  %mul2 = mul i32 %mul, %conv3.i
  %cmp96.not = icmp eq i32 %mul2, 0
  br i1 %cmp96.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %div866 = lshr i64 %bytes, 3
  %0 = shl i64 %conv.i, 3
  %tobool12 = icmp ne i32 %before, 0
  %cmp2593 = icmp ult i32 %before, 16
  %wide.trip.count = zext i32 %mul2 to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv106 = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next107, %if.end ]
  %1 = trunc i64 %indvars.iv106 to i32
  %div65 = lshr i32 %1, 3
  %rem = urem i32 %div65, %conv3.i
  %div4 = udiv i32 %div65, %conv3.i
  %conv = zext i32 %rem to i64
  %conv7 = zext i32 %div4 to i64
  %mul9 = mul i64 %div866, %conv7
  %add.ptr = getelementptr i64, ptr %rows, i64 %mul9
  %2 = shl i64 %conv, 7
  %mul10 = sub i64 %2, %0
  %add.ptr11 = getelementptr i64, ptr %add.ptr, i64 %mul10
  %tobool = icmp eq i32 %rem, 0
  %or.cond = and i1 %tobool12, %tobool
  br i1 %or.cond, label %for.cond24.preheader, label %for.cond13.preheader

for.cond13.preheader:
  %rem20 = and i64 %indvars.iv106, 7
  %idxprom.i = and i64 %indvars.iv106, 7
  %xor1.i = xor i64 %rem20, 1
  %arrayidx.i = getelementptr i64, ptr %add.ptr11, i64 %idxprom.i
  %3 = load i64, ptr %arrayidx.i, align 8
  %arrayidx.i.i = getelementptr i64, ptr @SECRET, i64 %idxprom.i
  %4 = load i64, ptr %arrayidx.i.i, align 8
  %xor.i = xor i64 %4, %3
  %arrayidx3.i = getelementptr i64, ptr %add.ptr11, i64 %xor1.i
  %5 = load i64, ptr %arrayidx3.i, align 8
  %and.i = and i64 %xor.i, 4294967295
  %shr.i = lshr i64 %xor.i, 32
  %mul4.i = mul i64 %and.i, %shr.i
  %add = add i64 %5, %mul4.i
  %add.ptr19.1 = getelementptr i8, ptr %add.ptr11, i64 64
  %arrayidx.i.1 = getelementptr i64, ptr %add.ptr19.1, i64 %idxprom.i
  %6 = load i64, ptr %arrayidx.i.1, align 8
  %gep110 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 8), i64 %idxprom.i
  %7 = load i64, ptr %gep110, align 8
  %xor.i.1 = xor i64 %7, %6
  %arrayidx3.i.1 = getelementptr i64, ptr %add.ptr19.1, i64 %xor1.i
  %8 = load i64, ptr %arrayidx3.i.1, align 8
  %and.i.1 = and i64 %xor.i.1, 4294967295
  %shr.i.1 = lshr i64 %xor.i.1, 32
  %mul4.i.1 = mul i64 %and.i.1, %shr.i.1
  %add5.i.1 = add i64 %8, %add
  %add.1 = add i64 %add5.i.1, %mul4.i.1
  %add.ptr19.2 = getelementptr i8, ptr %add.ptr11, i64 128
  %arrayidx.i.2 = getelementptr i64, ptr %add.ptr19.2, i64 %idxprom.i
  %9 = load i64, ptr %arrayidx.i.2, align 8
  %gep111 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 16), i64 %idxprom.i
  %10 = load i64, ptr %gep111, align 8
  %xor.i.2 = xor i64 %10, %9
  %arrayidx3.i.2 = getelementptr i64, ptr %add.ptr19.2, i64 %xor1.i
  %11 = load i64, ptr %arrayidx3.i.2, align 8
  %and.i.2 = and i64 %xor.i.2, 4294967295
  %shr.i.2 = lshr i64 %xor.i.2, 32
  %mul4.i.2 = mul i64 %and.i.2, %shr.i.2
  %add5.i.2 = add i64 %11, %add.1
  %add.2 = add i64 %add5.i.2, %mul4.i.2
  %add.ptr19.3 = getelementptr i8, ptr %add.ptr11, i64 192
  %arrayidx.i.3 = getelementptr i64, ptr %add.ptr19.3, i64 %idxprom.i
  %12 = load i64, ptr %arrayidx.i.3, align 8
  %gep112 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 24), i64 %idxprom.i
  %13 = load i64, ptr %gep112, align 8
  %xor.i.3 = xor i64 %13, %12
  %arrayidx3.i.3 = getelementptr i64, ptr %add.ptr19.3, i64 %xor1.i
  %14 = load i64, ptr %arrayidx3.i.3, align 8
  %and.i.3 = and i64 %xor.i.3, 4294967295
  %shr.i.3 = lshr i64 %xor.i.3, 32
  %mul4.i.3 = mul i64 %and.i.3, %shr.i.3
  %add5.i.3 = add i64 %14, %add.2
  %add.3 = add i64 %add5.i.3, %mul4.i.3
  %add.ptr19.4 = getelementptr i8, ptr %add.ptr11, i64 256
  %arrayidx.i.4 = getelementptr i64, ptr %add.ptr19.4, i64 %idxprom.i
  %15 = load i64, ptr %arrayidx.i.4, align 8
  %gep113 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 32), i64 %idxprom.i
  %16 = load i64, ptr %gep113, align 8
  %xor.i.4 = xor i64 %16, %15
  %arrayidx3.i.4 = getelementptr i64, ptr %add.ptr19.4, i64 %xor1.i
  %17 = load i64, ptr %arrayidx3.i.4, align 8
  %and.i.4 = and i64 %xor.i.4, 4294967295
  %shr.i.4 = lshr i64 %xor.i.4, 32
  %mul4.i.4 = mul i64 %and.i.4, %shr.i.4
  %add5.i.4 = add i64 %17, %add.3
  %add.4 = add i64 %add5.i.4, %mul4.i.4
  %add.ptr19.5 = getelementptr i8, ptr %add.ptr11, i64 320
  %arrayidx.i.5 = getelementptr i64, ptr %add.ptr19.5, i64 %idxprom.i
  %18 = load i64, ptr %arrayidx.i.5, align 8
  %gep114 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 40), i64 %idxprom.i
  %19 = load i64, ptr %gep114, align 8
  %xor.i.5 = xor i64 %19, %18
  %arrayidx3.i.5 = getelementptr i64, ptr %add.ptr19.5, i64 %xor1.i
  %20 = load i64, ptr %arrayidx3.i.5, align 8
  %and.i.5 = and i64 %xor.i.5, 4294967295
  %shr.i.5 = lshr i64 %xor.i.5, 32
  %mul4.i.5 = mul i64 %and.i.5, %shr.i.5
  %add5.i.5 = add i64 %20, %add.4
  %add.5 = add i64 %add5.i.5, %mul4.i.5
  %add.ptr19.6 = getelementptr i8, ptr %add.ptr11, i64 384
  %arrayidx.i.6 = getelementptr i64, ptr %add.ptr19.6, i64 %idxprom.i
  %21 = load i64, ptr %arrayidx.i.6, align 8
  %gep115 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 48), i64 %idxprom.i
  %22 = load i64, ptr %gep115, align 8
  %xor.i.6 = xor i64 %22, %21
  %arrayidx3.i.6 = getelementptr i64, ptr %add.ptr19.6, i64 %xor1.i
  %23 = load i64, ptr %arrayidx3.i.6, align 8
  %and.i.6 = and i64 %xor.i.6, 4294967295
  %shr.i.6 = lshr i64 %xor.i.6, 32
  %mul4.i.6 = mul i64 %and.i.6, %shr.i.6
  %add5.i.6 = add i64 %23, %add.5
  %add.6 = add i64 %add5.i.6, %mul4.i.6
  %add.ptr19.7 = getelementptr i8, ptr %add.ptr11, i64 448
  %arrayidx.i.7 = getelementptr i64, ptr %add.ptr19.7, i64 %idxprom.i
  %24 = load i64, ptr %arrayidx.i.7, align 8
  %gep116 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 56), i64 %idxprom.i
  %25 = load i64, ptr %gep116, align 8
  %xor.i.7 = xor i64 %25, %24
  %arrayidx3.i.7 = getelementptr i64, ptr %add.ptr19.7, i64 %xor1.i
  %26 = load i64, ptr %arrayidx3.i.7, align 8
  %and.i.7 = and i64 %xor.i.7, 4294967295
  %shr.i.7 = lshr i64 %xor.i.7, 32
  %mul4.i.7 = mul i64 %and.i.7, %shr.i.7
  %add5.i.7 = add i64 %26, %add.6
  %add.7 = add i64 %add5.i.7, %mul4.i.7
  %add.ptr19.8 = getelementptr i8, ptr %add.ptr11, i64 512
  %arrayidx.i.8 = getelementptr i64, ptr %add.ptr19.8, i64 %idxprom.i
  %27 = load i64, ptr %arrayidx.i.8, align 8
  %28 = or i64 %idxprom.i, 8
  %arrayidx.i.i.8 = getelementptr i64, ptr @SECRET, i64 %28
  %29 = load i64, ptr %arrayidx.i.i.8, align 8
  %xor.i.8 = xor i64 %29, %27
  %arrayidx3.i.8 = getelementptr i64, ptr %add.ptr19.8, i64 %xor1.i
  %30 = load i64, ptr %arrayidx3.i.8, align 8
  %and.i.8 = and i64 %xor.i.8, 4294967295
  %shr.i.8 = lshr i64 %xor.i.8, 32
  %mul4.i.8 = mul i64 %and.i.8, %shr.i.8
  %add5.i.8 = add i64 %30, %add.7
  %add.8 = add i64 %add5.i.8, %mul4.i.8
  %add.ptr19.9 = getelementptr i8, ptr %add.ptr11, i64 576
  %arrayidx.i.9 = getelementptr i64, ptr %add.ptr19.9, i64 %idxprom.i
  %31 = load i64, ptr %arrayidx.i.9, align 8
  %gep117 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 72), i64 %idxprom.i
  %32 = load i64, ptr %gep117, align 8
  %xor.i.9 = xor i64 %32, %31
  %arrayidx3.i.9 = getelementptr i64, ptr %add.ptr19.9, i64 %xor1.i
  %33 = load i64, ptr %arrayidx3.i.9, align 8
  %and.i.9 = and i64 %xor.i.9, 4294967295
  %shr.i.9 = lshr i64 %xor.i.9, 32
  %mul4.i.9 = mul i64 %and.i.9, %shr.i.9
  %add5.i.9 = add i64 %33, %add.8
  %add.9 = add i64 %add5.i.9, %mul4.i.9
  %add.ptr19.10 = getelementptr i8, ptr %add.ptr11, i64 640
  %arrayidx.i.10 = getelementptr i64, ptr %add.ptr19.10, i64 %idxprom.i
  %34 = load i64, ptr %arrayidx.i.10, align 8
  %gep118 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 80), i64 %idxprom.i
  %35 = load i64, ptr %gep118, align 8
  %xor.i.10 = xor i64 %35, %34
  %arrayidx3.i.10 = getelementptr i64, ptr %add.ptr19.10, i64 %xor1.i
  %36 = load i64, ptr %arrayidx3.i.10, align 8
  %and.i.10 = and i64 %xor.i.10, 4294967295
  %shr.i.10 = lshr i64 %xor.i.10, 32
  %mul4.i.10 = mul i64 %and.i.10, %shr.i.10
  %add5.i.10 = add i64 %36, %add.9
  %add.10 = add i64 %add5.i.10, %mul4.i.10
  %add.ptr19.11 = getelementptr i8, ptr %add.ptr11, i64 704
  %arrayidx.i.11 = getelementptr i64, ptr %add.ptr19.11, i64 %idxprom.i
  %37 = load i64, ptr %arrayidx.i.11, align 8
  %gep119 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 88), i64 %idxprom.i
  %38 = load i64, ptr %gep119, align 8
  %xor.i.11 = xor i64 %38, %37
  %arrayidx3.i.11 = getelementptr i64, ptr %add.ptr19.11, i64 %xor1.i
  %39 = load i64, ptr %arrayidx3.i.11, align 8
  %and.i.11 = and i64 %xor.i.11, 4294967295
  %shr.i.11 = lshr i64 %xor.i.11, 32
  %mul4.i.11 = mul i64 %and.i.11, %shr.i.11
  %add5.i.11 = add i64 %39, %add.10
  %add.11 = add i64 %add5.i.11, %mul4.i.11
  %add.ptr19.12 = getelementptr i8, ptr %add.ptr11, i64 768
  %arrayidx.i.12 = getelementptr i64, ptr %add.ptr19.12, i64 %idxprom.i
  %40 = load i64, ptr %arrayidx.i.12, align 8
  %gep120 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 96), i64 %idxprom.i
  %41 = load i64, ptr %gep120, align 8
  %xor.i.12 = xor i64 %41, %40
  %arrayidx3.i.12 = getelementptr i64, ptr %add.ptr19.12, i64 %xor1.i
  %42 = load i64, ptr %arrayidx3.i.12, align 8
  %and.i.12 = and i64 %xor.i.12, 4294967295
  %shr.i.12 = lshr i64 %xor.i.12, 32
  %mul4.i.12 = mul i64 %and.i.12, %shr.i.12
  %add5.i.12 = add i64 %42, %add.11
  %add.12 = add i64 %add5.i.12, %mul4.i.12
  %add.ptr19.13 = getelementptr i8, ptr %add.ptr11, i64 832
  %arrayidx.i.13 = getelementptr i64, ptr %add.ptr19.13, i64 %idxprom.i
  %43 = load i64, ptr %arrayidx.i.13, align 8
  %gep121 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 104), i64 %idxprom.i
  %44 = load i64, ptr %gep121, align 8
  %xor.i.13 = xor i64 %44, %43
  %arrayidx3.i.13 = getelementptr i64, ptr %add.ptr19.13, i64 %xor1.i
  %45 = load i64, ptr %arrayidx3.i.13, align 8
  %and.i.13 = and i64 %xor.i.13, 4294967295
  %shr.i.13 = lshr i64 %xor.i.13, 32
  %mul4.i.13 = mul i64 %and.i.13, %shr.i.13
  %add5.i.13 = add i64 %45, %add.12
  %add.13 = add i64 %add5.i.13, %mul4.i.13
  %add.ptr19.14 = getelementptr i8, ptr %add.ptr11, i64 896
  %arrayidx.i.14 = getelementptr i64, ptr %add.ptr19.14, i64 %idxprom.i
  %46 = load i64, ptr %arrayidx.i.14, align 8
  %gep122 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 112), i64 %idxprom.i
  %47 = load i64, ptr %gep122, align 8
  %xor.i.14 = xor i64 %47, %46
  %arrayidx3.i.14 = getelementptr i64, ptr %add.ptr19.14, i64 %xor1.i
  %48 = load i64, ptr %arrayidx3.i.14, align 8
  %and.i.14 = and i64 %xor.i.14, 4294967295
  %shr.i.14 = lshr i64 %xor.i.14, 32
  %mul4.i.14 = mul i64 %and.i.14, %shr.i.14
  %add5.i.14 = add i64 %48, %add.13
  %add.14 = add i64 %add5.i.14, %mul4.i.14
  %add.ptr19.15 = getelementptr i8, ptr %add.ptr11, i64 960
  %arrayidx.i.15 = getelementptr i64, ptr %add.ptr19.15, i64 %idxprom.i
  %49 = load i64, ptr %arrayidx.i.15, align 8
  %gep123 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 120), i64 %idxprom.i
  %50 = load i64, ptr %gep123, align 8
  %xor.i.15 = xor i64 %50, %49
  %arrayidx3.i.15 = getelementptr i64, ptr %add.ptr19.15, i64 %xor1.i
  %51 = load i64, ptr %arrayidx3.i.15, align 8
  %and.i.15 = and i64 %xor.i.15, 4294967295
  %shr.i.15 = lshr i64 %xor.i.15, 32
  %mul4.i.15 = mul i64 %and.i.15, %shr.i.15
  %add5.i.15 = add i64 %51, %add.14
  %add.15 = add i64 %add5.i.15, %mul4.i.15
  br label %if.end

for.cond24.preheader:
  br i1 %cmp2593, label %for.body28.lr.ph, label %if.end

for.body28.lr.ph:
  %rem32 = and i64 %indvars.iv106, 7
  %idxprom.i67 = and i64 %indvars.iv106, 7
  %xor1.i82 = xor i64 %rem32, 1
  %invariant.gep = getelementptr i64, ptr @SECRET, i64 %idxprom.i67
  br label %for.body28

for.body28:
  %indvars.iv = phi i64 [ %conv.i, %for.body28.lr.ph ], [ %indvars.iv.next, %for.body28 ]
  %sum.194 = phi i64 [ 0, %for.body28.lr.ph ], [ %add35, %for.body28 ]
  %add.ptr31.idx = shl i64 %indvars.iv, 6
  %add.ptr31 = getelementptr i8, ptr %add.ptr11, i64 %add.ptr31.idx
  %arrayidx.i68 = getelementptr i64, ptr %add.ptr31, i64 %idxprom.i67
  %52 = load i64, ptr %arrayidx.i68, align 8
  %gep = getelementptr i64, ptr %invariant.gep, i64 %indvars.iv
  %53 = load i64, ptr %gep, align 8
  %xor.i81 = xor i64 %53, %52
  %arrayidx3.i84 = getelementptr i64, ptr %add.ptr31, i64 %xor1.i82
  %54 = load i64, ptr %arrayidx3.i84, align 8
  %and.i85 = and i64 %xor.i81, 4294967295
  %shr.i86 = lshr i64 %xor.i81, 32
  %mul4.i87 = mul i64 %and.i85, %shr.i86
  %add5.i88 = add i64 %54, %sum.194
  %add35 = add i64 %add5.i88, %mul4.i87
  %indvars.iv.next = add i64 %indvars.iv, 1
  %55 = and i64 %indvars.iv.next, 4294967295
  %exitcond.not = icmp eq i64 %55, 16
  br i1 %exitcond.not, label %if.end, label %for.body28

if.end:
  %sum.2 = phi i64 [ 0, %for.cond24.preheader ], [ %add.15, %for.cond13.preheader ], [ %add35, %for.body28 ]
  %arrayidx = getelementptr i64, ptr %sums, i64 %indvars.iv106
  store i64 %sum.2, ptr %arrayidx, align 8
  %indvars.iv.next107 = add i64 %indvars.iv106, 1
  %exitcond109.not = icmp eq i64 %indvars.iv.next107, %wide.trip.count
  br i1 %exitcond109.not, label %for.cond.cleanup, label %for.body
}

define void @row_sums(ptr %rows, i32 %count, i64 %bytes, i32 %before, i32 %more, ptr %sums, ptr %begun, ptr %totals) {
entry:
  %conv.i = zext i32 %before to i64
  %div4.i = lshr i64 %bytes, 6
  %add.i = add i64 %div4.i, %conv.i
  %tobool.not.i = icmp eq i32 %more, 0
  %conv1.neg.i = sext i1 %tobool.not.i to i64
  %sub.i = add i64 %add.i, %conv1.neg.i
  %div25.i = lshr i64 %sub.i, 4
  %conv3.i = trunc i64 %div25.i to i32
  %mul = shl i32 %count, 3
  %cmp225.not = icmp eq i32 %mul, 0
  br i1 %cmp225.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %conv2 = shl i64 %div25.i, 6
  %mul3 = and i64 %conv2, 274877906880
  %tobool.not = icmp eq ptr %begun, null
  %cmp10 = icmp ugt i32 %conv3.i, 15
  %cmp24.not210 = icmp ult i32 %conv3.i, 32
  %div77175 = lshr i64 %bytes, 3
  %add.ptr82.idx = mul i64 %conv.i, -64
  %invariant.gep = getelementptr i8, ptr %rows, i64 %add.ptr82.idx
  %tobool83.not = icmp eq i32 %conv3.i, 0
  %mul85 = shl i32 %conv3.i, 4
  %cond88 = select i1 %tobool83.not, i32 %before, i32 %mul85
  %conv89 = zext i32 %cond88 to i64
  %cmp96220 = icmp ugt i64 %sub.i, %conv89
  %0 = and i64 %div25.i, 4294967295
  %wide.trip.count243 = zext i32 %mul to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv240 = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next241, %if.end115 ]
  %1 = trunc i64 %indvars.iv240 to i32
  %rem = and i32 %1, 7
  %div174 = lshr i64 %indvars.iv240, 3
  %conv = and i64 %div174, 536870911
  %add.ptr.idx = mul i64 %mul3, %conv
  %add.ptr = getelementptr i8, ptr %sums, i64 %add.ptr.idx
  %idx.ext = and i64 %indvars.iv240, 7
  %add.ptr5 = getelementptr i64, ptr %add.ptr, i64 %idx.ext
  %arrayidx = getelementptr i64, ptr %begun, i64 %indvars.iv240
  %arrayidx7 = getelementptr [8 x i64], ptr @FIRST_SUMS, i64 0, i64 %idx.ext
  %cond.in = select i1 %tobool.not, ptr %arrayidx7, ptr %arrayidx
  %cond = load i64, ptr %cond.in, align 8
  %add = or i32 %rem, 16
  %idxprom.i = zext i32 %add to i64
  %arrayidx.i = getelementptr i64, ptr @SECRET, i64 %idxprom.i
  %2 = load i64, ptr %arrayidx.i, align 8
  br i1 %cmp10, label %if.then, label %if.end

if.then:
  %3 = load i64, ptr %add.ptr5, align 8
  %arrayidx19.1 = getelementptr i8, ptr %add.ptr5, i64 64
  %4 = load i64, ptr %arrayidx19.1, align 8
  %arrayidx19.2 = getelementptr i8, ptr %add.ptr5, i64 128
  %5 = load i64, ptr %arrayidx19.2, align 8
  %arrayidx19.3 = getelementptr i8, ptr %add.ptr5, i64 192
  %6 = load i64, ptr %arrayidx19.3, align 8
  %arrayidx19.4 = getelementptr i8, ptr %add.ptr5, i64 256
  %7 = load i64, ptr %arrayidx19.4, align 8
  %arrayidx19.5 = getelementptr i8, ptr %add.ptr5, i64 320
  %8 = load i64, ptr %arrayidx19.5, align 8
  %arrayidx19.6 = getelementptr i8, ptr %add.ptr5, i64 384
  %9 = load i64, ptr %arrayidx19.6, align 8
  %arrayidx19.7 = getelementptr i8, ptr %add.ptr5, i64 448
  %10 = load i64, ptr %arrayidx19.7, align 8
  %arrayidx19.8 = getelementptr i8, ptr %add.ptr5, i64 512
  %11 = load i64, ptr %arrayidx19.8, align 8
  %arrayidx19.9 = getelementptr i8, ptr %add.ptr5, i64 576
  %12 = load i64, ptr %arrayidx19.9, align 8
  %arrayidx19.10 = getelementptr i8, ptr %add.ptr5, i64 640
  %13 = load i64, ptr %arrayidx19.10, align 8
  %arrayidx19.11 = getelementptr i8, ptr %add.ptr5, i64 704
  %14 = load i64, ptr %arrayidx19.11, align 8
  %arrayidx19.12 = getelementptr i8, ptr %add.ptr5, i64 768
  %15 = load i64, ptr %arrayidx19.12, align 8
  %arrayidx19.13 = getelementptr i8, ptr %add.ptr5, i64 832
  %16 = load i64, ptr %arrayidx19.13, align 8
  %arrayidx19.14 = getelementptr i8, ptr %add.ptr5, i64 896
  %17 = load i64, ptr %arrayidx19.14, align 8
  %arrayidx19.15 = getelementptr i8, ptr %add.ptr5, i64 960
  %18 = load i64, ptr %arrayidx19.15, align 8
  br i1 %cmp24.not210, label %for.cond51.preheader, label %for.cond28.preheader

for.cond51.preheader.loopexit:
  %19 = trunc i64 %indvars.iv.next to i32
  br label %for.cond51.preheader

for.cond51.preheader:
  %ahead.sroa.62.0 = phi i64 [ %18, %if.then ], [ %82, %for.cond51.preheader.loopexit ]
  %ahead.sroa.58.0 = phi i64 [ %17, %if.then ], [ %79, %for.cond51.preheader.loopexit ]
  %ahead.sroa.54.0 = phi i64 [ %16, %if.then ], [ %76, %for.cond51.preheader.loopexit ]
  %ahead.sroa.50.0 = phi i64 [ %15, %if.then ], [ %73, %for.cond51.preheader.loopexit ]
  %ahead.sroa.46.0 = phi i64 [ %14, %if.then ], [ %70, %for.cond51.preheader.loopexit ]
  %ahead.sroa.42.0 = phi i64 [ %13, %if.then ], [ %67, %for.cond51.preheader.loopexit ]
  %ahead.sroa.38.0 = phi i64 [ %12, %if.then ], [ %64, %for.cond51.preheader.loopexit ]
  %ahead.sroa.34.0 = phi i64 [ %11, %if.then ], [ %61, %for.cond51.preheader.loopexit ]
  %ahead.sroa.30.0 = phi i64 [ %10, %if.then ], [ %58, %for.cond51.preheader.loopexit ]
  %ahead.sroa.26.0 = phi i64 [ %9, %if.then ], [ %55, %for.cond51.preheader.loopexit ]
  %ahead.sroa.22.0 = phi i64 [ %8, %if.then ], [ %52, %for.cond51.preheader.loopexit ]
  %ahead.sroa.18.0 = phi i64 [ %7, %if.then ], [ %49, %for.cond51.preheader.loopexit ]
  %ahead.sroa.14.0 = phi i64 [ %6, %if.then ], [ %46, %for.cond51.preheader.loopexit ]
  %ahead.sroa.10.0 = phi i64 [ %5, %if.then ], [ %43, %for.cond51.preheader.loopexit ]
  %ahead.sroa.6.0 = phi i64 [ %4, %if.then ], [ %40, %for.cond51.preheader.loopexit ]
  %ahead.sroa.0.0 = phi i64 [ %3, %if.then ], [ %37, %for.cond51.preheader.loopexit ]
  %total.0.lcssa = phi i64 [ %cond, %if.then ], [ %mul.i179.15, %for.cond51.preheader.loopexit ]
  %block.0.lcssa = phi i32 [ 0, %if.then ], [ %19, %for.cond51.preheader.loopexit ]
  %add58 = add i64 %ahead.sroa.0.0, %total.0.lcssa
  %shr.i180 = lshr i64 %add58, 47
  %20 = xor i64 %2, %shr.i180
  %xor1.i181 = xor i64 %20, %add58
  %mul.i182 = mul i64 %xor1.i181, 2654435761
  %add58.1 = add i64 %ahead.sroa.6.0, %mul.i182
  %shr.i180.1 = lshr i64 %add58.1, 47
  %21 = xor i64 %2, %shr.i180.1
  %xor1.i181.1 = xor i64 %21, %add58.1
  %mul.i182.1 = mul i64 %xor1.i181.1, 2654435761
  %add58.2 = add i64 %ahead.sroa.10.0, %mul.i182.1
  %shr.i180.2 = lshr i64 %add58.2, 47
  %22 = xor i64 %2, %shr.i180.2
  %xor1.i181.2 = xor i64 %22, %add58.2
  %mul.i182.2 = mul i64 %xor1.i181.2, 2654435761
  %add58.3 = add i64 %ahead.sroa.14.0, %mul.i182.2
  %shr.i180.3 = lshr i64 %add58.3, 47
  %23 = xor i64 %2, %shr.i180.3
  %xor1.i181.3 = xor i64 %23, %add58.3
  %mul.i182.3 = mul i64 %xor1.i181.3, 2654435761
  %add58.4 = add i64 %ahead.sroa.18.0, %mul.i182.3
  %shr.i180.4 = lshr i64 %add58.4, 47
  %24 = xor i64 %2, %shr.i180.4
  %xor1.i181.4 = xor i64 %24, %add58.4
  %mul.i182.4 = mul i64 %xor1.i181.4, 2654435761
  %add58.5 = add i64 %ahead.sroa.22.0, %mul.i182.4
  %shr.i180.5 = lshr i64 %add58.5, 47
  %25 = xor i64 %2, %shr.i180.5
  %xor1.i181.5 = xor i64 %25, %add58.5
  %mul.i182.5 = mul i64 %xor1.i181.5, 2654435761
  %add58.6 = add i64 %ahead.sroa.26.0, %mul.i182.5
  %shr.i180.6 = lshr i64 %add58.6, 47
  %26 = xor i64 %2, %shr.i180.6
  %xor1.i181.6 = xor i64 %26, %add58.6
  %mul.i182.6 = mul i64 %xor1.i181.6, 2654435761
  %add58.7 = add i64 %ahead.sroa.30.0, %mul.i182.6
  %shr.i180.7 = lshr i64 %add58.7, 47
  %27 = xor i64 %2, %shr.i180.7
  %xor1.i181.7 = xor i64 %27, %add58.7
  %mul.i182.7 = mul i64 %xor1.i181.7, 2654435761
  %add58.8 = add i64 %ahead.sroa.34.0, %mul.i182.7
  %shr.i180.8 = lshr i64 %add58.8, 47
  %28 = xor i64 %2, %shr.i180.8
  %xor1.i181.8 = xor i64 %28, %add58.8
  %mul.i182.8 = mul i64 %xor1.i181.8, 2654435761
  %add58.9 = add i64 %ahead.sroa.38.0, %mul.i182.8
  %shr.i180.9 = lshr i64 %add58.9, 47
  %29 = xor i64 %2, %shr.i180.9
  %xor1.i181.9 = xor i64 %29, %add58.9
  %mul.i182.9 = mul i64 %xor1.i181.9, 2654435761
  %add58.10 = add i64 %ahead.sroa.42.0, %mul.i182.9
  %shr.i180.10 = lshr i64 %add58.10, 47
  %30 = xor i64 %2, %shr.i180.10
  %xor1.i181.10 = xor i64 %30, %add58.10
  %mul.i182.10 = mul i64 %xor1.i181.10, 2654435761
  %add58.11 = add i64 %ahead.sroa.46.0, %mul.i182.10
  %shr.i180.11 = lshr i64 %add58.11, 47
  %31 = xor i64 %2, %shr.i180.11
  %xor1.i181.11 = xor i64 %31, %add58.11
  %mul.i182.11 = mul i64 %xor1.i181.11, 2654435761
  %add58.12 = add i64 %ahead.sroa.50.0, %mul.i182.11
  %shr.i180.12 = lshr i64 %add58.12, 47
  %32 = xor i64 %2, %shr.i180.12
  %xor1.i181.12 = xor i64 %32, %add58.12
  %mul.i182.12 = mul i64 %xor1.i181.12, 2654435761
  %add58.13 = add i64 %ahead.sroa.54.0, %mul.i182.12
  %shr.i180.13 = lshr i64 %add58.13, 47
  %33 = xor i64 %2, %shr.i180.13
  %xor1.i181.13 = xor i64 %33, %add58.13
  %mul.i182.13 = mul i64 %xor1.i181.13, 2654435761
  %add58.14 = add i64 %ahead.sroa.58.0, %mul.i182.13
  %shr.i180.14 = lshr i64 %add58.14, 47
  %34 = xor i64 %2, %shr.i180.14
  %xor1.i181.14 = xor i64 %34, %add58.14
  %mul.i182.14 = mul i64 %xor1.i181.14, 2654435761
  %add58.15 = add i64 %ahead.sroa.62.0, %mul.i182.14
  %shr.i180.15 = lshr i64 %add58.15, 47
  %35 = xor i64 %2, %shr.i180.15
  %xor1.i181.15 = xor i64 %35, %add58.15
  %mul.i182.15 = mul i64 %xor1.i181.15, 2654435761
  %add63 = add i32 %block.0.lcssa, 16
  br label %if.end

for.cond28.preheader:
  %ahead.sroa.62.1 = phi i64 [ %82, %for.cond28.preheader ], [ %18, %if.then ]
  %ahead.sroa.58.1 = phi i64 [ %79, %for.cond28.preheader ], [ %17, %if.then ]
  %ahead.sroa.54.1 = phi i64 [ %76, %for.cond28.preheader ], [ %16, %if.then ]
  %ahead.sroa.50.1 = phi i64 [ %73, %for.cond28.preheader ], [ %15, %if.then ]
  %ahead.sroa.46.1 = phi i64 [ %70, %for.cond28.preheader ], [ %14, %if.then ]
  %ahead.sroa.42.1 = phi i64 [ %67, %for.cond28.preheader ], [ %13, %if.then ]
  %ahead.sroa.38.1 = phi i64 [ %64, %for.cond28.preheader ], [ %12, %if.then ]
  %ahead.sroa.34.1 = phi i64 [ %61, %for.cond28.preheader ], [ %11, %if.then ]
  %ahead.sroa.30.1 = phi i64 [ %58, %for.cond28.preheader ], [ %10, %if.then ]
  %ahead.sroa.26.1 = phi i64 [ %55, %for.cond28.preheader ], [ %9, %if.then ]
  %ahead.sroa.22.1 = phi i64 [ %52, %for.cond28.preheader ], [ %8, %if.then ]
  %ahead.sroa.18.1 = phi i64 [ %49, %for.cond28.preheader ], [ %7, %if.then ]
  %ahead.sroa.14.1 = phi i64 [ %46, %for.cond28.preheader ], [ %6, %if.then ]
  %ahead.sroa.10.1 = phi i64 [ %43, %for.cond28.preheader ], [ %5, %if.then ]
  %ahead.sroa.6.1 = phi i64 [ %40, %for.cond28.preheader ], [ %4, %if.then ]
  %ahead.sroa.0.1 = phi i64 [ %37, %for.cond28.preheader ], [ %3, %if.then ]
  %indvars.iv = phi i64 [ %indvars.iv.next, %for.cond28.preheader ], [ 0, %if.then ]
  %total.0211 = phi i64 [ %mul.i179.15, %for.cond28.preheader ], [ %cond, %if.then ]
  %indvars.iv.next = add i64 %indvars.iv, 16
  %add35 = add i64 %ahead.sroa.0.1, %total.0211
  %shr.i = lshr i64 %add35, 47
  %36 = xor i64 %2, %shr.i
  %xor1.i = xor i64 %36, %add35
  %mul.i179 = mul i64 %xor1.i, 2654435761
  %mul39 = shl i64 %indvars.iv.next, 3
  %idxprom40 = and i64 %mul39, 4294967168
  %arrayidx41 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40
  %37 = load i64, ptr %arrayidx41, align 8
  %add35.1 = add i64 %ahead.sroa.6.1, %mul.i179
  %shr.i.1 = lshr i64 %add35.1, 47
  %38 = xor i64 %2, %shr.i.1
  %xor1.i.1 = xor i64 %38, %add35.1
  %mul.i179.1 = mul i64 %xor1.i.1, 2654435761
  %39 = shl i64 %indvars.iv, 3
  %mul39.1 = add i64 %39, 136
  %idxprom40.1 = and i64 %mul39.1, 4294967176
  %arrayidx41.1 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.1
  %40 = load i64, ptr %arrayidx41.1, align 8
  %add35.2 = add i64 %ahead.sroa.10.1, %mul.i179.1
  %shr.i.2 = lshr i64 %add35.2, 47
  %41 = xor i64 %2, %shr.i.2
  %xor1.i.2 = xor i64 %41, %add35.2
  %mul.i179.2 = mul i64 %xor1.i.2, 2654435761
  %42 = shl i64 %indvars.iv, 3
  %mul39.2 = add i64 %42, 144
  %idxprom40.2 = and i64 %mul39.2, 4294967184
  %arrayidx41.2 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.2
  %43 = load i64, ptr %arrayidx41.2, align 8
  %add35.3 = add i64 %ahead.sroa.14.1, %mul.i179.2
  %shr.i.3 = lshr i64 %add35.3, 47
  %44 = xor i64 %2, %shr.i.3
  %xor1.i.3 = xor i64 %44, %add35.3
  %mul.i179.3 = mul i64 %xor1.i.3, 2654435761
  %45 = shl i64 %indvars.iv, 3
  %mul39.3 = add i64 %45, 152
  %idxprom40.3 = and i64 %mul39.3, 4294967192
  %arrayidx41.3 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.3
  %46 = load i64, ptr %arrayidx41.3, align 8
  %add35.4 = add i64 %ahead.sroa.18.1, %mul.i179.3
  %shr.i.4 = lshr i64 %add35.4, 47
  %47 = xor i64 %2, %shr.i.4
  %xor1.i.4 = xor i64 %47, %add35.4
  %mul.i179.4 = mul i64 %xor1.i.4, 2654435761
  %48 = shl i64 %indvars.iv, 3
  %mul39.4 = add i64 %48, 160
  %idxprom40.4 = and i64 %mul39.4, 4294967200
  %arrayidx41.4 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.4
  %49 = load i64, ptr %arrayidx41.4, align 8
  %add35.5 = add i64 %ahead.sroa.22.1, %mul.i179.4
  %shr.i.5 = lshr i64 %add35.5, 47
  %50 = xor i64 %2, %shr.i.5
  %xor1.i.5 = xor i64 %50, %add35.5
  %mul.i179.5 = mul i64 %xor1.i.5, 2654435761
  %51 = shl i64 %indvars.iv, 3
  %mul39.5 = add i64 %51, 168
  %idxprom40.5 = and i64 %mul39.5, 4294967208
  %arrayidx41.5 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.5
  %52 = load i64, ptr %arrayidx41.5, align 8
  %add35.6 = add i64 %ahead.sroa.26.1, %mul.i179.5
  %shr.i.6 = lshr i64 %add35.6, 47
  %53 = xor i64 %2, %shr.i.6
  %xor1.i.6 = xor i64 %53, %add35.6
  %mul.i179.6 = mul i64 %xor1.i.6, 2654435761
  %54 = shl i64 %indvars.iv, 3
  %mul39.6 = add i64 %54, 176
  %idxprom40.6 = and i64 %mul39.6, 4294967216
  %arrayidx41.6 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.6
  %55 = load i64, ptr %arrayidx41.6, align 8
  %add35.7 = add i64 %ahead.sroa.30.1, %mul.i179.6
  %shr.i.7 = lshr i64 %add35.7, 47
  %56 = xor i64 %2, %shr.i.7
  %xor1.i.7 = xor i64 %56, %add35.7
  %mul.i179.7 = mul i64 %xor1.i.7, 2654435761
  %57 = shl i64 %indvars.iv, 3
  %mul39.7 = add i64 %57, 184
  %idxprom40.7 = and i64 %mul39.7, 4294967224
  %arrayidx41.7 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.7
  %58 = load i64, ptr %arrayidx41.7, align 8
  %add35.8 = add i64 %ahead.sroa.34.1, %mul.i179.7
  %shr.i.8 = lshr i64 %add35.8, 47
  %59 = xor i64 %2, %shr.i.8
  %xor1.i.8 = xor i64 %59, %add35.8
  %mul.i179.8 = mul i64 %xor1.i.8, 2654435761
  %60 = shl i64 %indvars.iv, 3
  %mul39.8 = add i64 %60, 192
  %idxprom40.8 = and i64 %mul39.8, 4294967232
  %arrayidx41.8 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.8
  %61 = load i64, ptr %arrayidx41.8, align 8
  %add35.9 = add i64 %ahead.sroa.38.1, %mul.i179.8
  %shr.i.9 = lshr i64 %add35.9, 47
  %62 = xor i64 %2, %shr.i.9
  %xor1.i.9 = xor i64 %62, %add35.9
  %mul.i179.9 = mul i64 %xor1.i.9, 2654435761
  %63 = shl i64 %indvars.iv, 3
  %mul39.9 = add i64 %63, 200
  %idxprom40.9 = and i64 %mul39.9, 4294967240
  %arrayidx41.9 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.9
  %64 = load i64, ptr %arrayidx41.9, align 8
  %add35.10 = add i64 %ahead.sroa.42.1, %mul.i179.9
  %shr.i.10 = lshr i64 %add35.10, 47
  %65 = xor i64 %2, %shr.i.10
  %xor1.i.10 = xor i64 %65, %add35.10
  %mul.i179.10 = mul i64 %xor1.i.10, 2654435761
  %66 = shl i64 %indvars.iv, 3
  %mul39.10 = add i64 %66, 208
  %idxprom40.10 = and i64 %mul39.10, 4294967248
  %arrayidx41.10 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.10
  %67 = load i64, ptr %arrayidx41.10, align 8
  %add35.11 = add i64 %ahead.sroa.46.1, %mul.i179.10
  %shr.i.11 = lshr i64 %add35.11, 47
  %68 = xor i64 %2, %shr.i.11
  %xor1.i.11 = xor i64 %68, %add35.11
  %mul.i179.11 = mul i64 %xor1.i.11, 2654435761
  %69 = shl i64 %indvars.iv, 3
  %mul39.11 = add i64 %69, 216
  %idxprom40.11 = and i64 %mul39.11, 4294967256
  %arrayidx41.11 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.11
  %70 = load i64, ptr %arrayidx41.11, align 8
  %add35.12 = add i64 %ahead.sroa.50.1, %mul.i179.11
  %shr.i.12 = lshr i64 %add35.12, 47
  %71 = xor i64 %2, %shr.i.12
  %xor1.i.12 = xor i64 %71, %add35.12
  %mul.i179.12 = mul i64 %xor1.i.12, 2654435761
  %72 = shl i64 %indvars.iv, 3
  %mul39.12 = add i64 %72, 224
  %idxprom40.12 = and i64 %mul39.12, 4294967264
  %arrayidx41.12 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.12
  %73 = load i64, ptr %arrayidx41.12, align 8
  %add35.13 = add i64 %ahead.sroa.54.1, %mul.i179.12
  %shr.i.13 = lshr i64 %add35.13, 47
  %74 = xor i64 %2, %shr.i.13
  %xor1.i.13 = xor i64 %74, %add35.13
  %mul.i179.13 = mul i64 %xor1.i.13, 2654435761
  %75 = shl i64 %indvars.iv, 3
  %mul39.13 = add i64 %75, 232
  %idxprom40.13 = and i64 %mul39.13, 4294967272
  %arrayidx41.13 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.13
  %76 = load i64, ptr %arrayidx41.13, align 8
  %add35.14 = add i64 %ahead.sroa.58.1, %mul.i179.13
  %shr.i.14 = lshr i64 %add35.14, 47
  %77 = xor i64 %2, %shr.i.14
  %xor1.i.14 = xor i64 %77, %add35.14
  %mul.i179.14 = mul i64 %xor1.i.14, 2654435761
  %78 = shl i64 %indvars.iv, 3
  %mul39.14 = add i64 %78, 240
  %idxprom40.14 = and i64 %mul39.14, 4294967280
  %arrayidx41.14 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.14
  %79 = load i64, ptr %arrayidx41.14, align 8
  %add35.15 = add i64 %ahead.sroa.62.1, %mul.i179.14
  %shr.i.15 = lshr i64 %add35.15, 47
  %80 = xor i64 %2, %shr.i.15
  %xor1.i.15 = xor i64 %80, %add35.15
  %mul.i179.15 = mul i64 %xor1.i.15, 2654435761
  %81 = shl i64 %indvars.iv, 3
  %mul39.15 = add i64 %81, 248
  %idxprom40.15 = and i64 %mul39.15, 4294967288
  %arrayidx41.15 = getelementptr i64, ptr %add.ptr5, i64 %idxprom40.15
  %82 = load i64, ptr %arrayidx41.15, align 8
  %83 = add i64 %indvars.iv, 48
  %cmp24.not = icmp ugt i64 %83, %0
  br i1 %cmp24.not, label %for.cond51.preheader.loopexit, label %for.cond28.preheader

if.end:
  %total.3 = phi i64 [ %mul.i182.15, %for.cond51.preheader ], [ %cond, %for.body ]
  %block.1 = phi i32 [ %add63, %for.cond51.preheader ], [ 0, %for.body ]
  %cmp65216 = icmp ult i32 %block.1, %conv3.i
  br i1 %cmp65216, label %for.body67.preheader, label %for.end75

for.body67.preheader:
  %84 = zext i32 %block.1 to i64
  %85 = sub i64 %div25.i, %84
  %.neg = add i64 %84, 1
  %xtraiter = and i64 %85, 1
  %lcmp.mod.not = icmp eq i64 %xtraiter, 0
  br i1 %lcmp.mod.not, label %for.body67.prol.loopexit, label %for.body67.prol

for.body67.prol:
  %mul68.prol = shl i64 %84, 3
  %idxprom69.prol = and i64 %mul68.prol, 4294967288
  %arrayidx70.prol = getelementptr i64, ptr %add.ptr5, i64 %idxprom69.prol
  %86 = load i64, ptr %arrayidx70.prol, align 8
  %add71.prol = add i64 %86, %total.3
  %shr.i183.prol = lshr i64 %add71.prol, 47
  %87 = xor i64 %2, %shr.i183.prol
  %xor1.i184.prol = xor i64 %87, %add71.prol
  %mul.i185.prol = mul i64 %xor1.i184.prol, 2654435761
  %indvars.iv.next238.prol = add i64 %84, 1
  br label %for.body67.prol.loopexit

for.body67.prol.loopexit:
  %mul.i185.lcssa.unr = phi i64 [ poison, %for.body67.preheader ], [ %mul.i185.prol, %for.body67.prol ]
  %indvars.iv237.unr = phi i64 [ %84, %for.body67.preheader ], [ %indvars.iv.next238.prol, %for.body67.prol ]
  %total.4217.unr = phi i64 [ %total.3, %for.body67.preheader ], [ %mul.i185.prol, %for.body67.prol ]
  %88 = icmp eq i64 %0, %.neg
  br i1 %88, label %for.end75, label %for.body67

for.body67:
  %indvars.iv237 = phi i64 [ %indvars.iv.next238.1, %for.body67 ], [ %indvars.iv237.unr, %for.body67.prol.loopexit ]
  %total.4217 = phi i64 [ %mul.i185.1, %for.body67 ], [ %total.4217.unr, %for.body67.prol.loopexit ]
  %mul68 = shl i64 %indvars.iv237, 3
  %idxprom69 = and i64 %mul68, 4294967288
  %arrayidx70 = getelementptr i64, ptr %add.ptr5, i64 %idxprom69
  %89 = load i64, ptr %arrayidx70, align 8
  %add71 = add i64 %89, %total.4217
  %shr.i183 = lshr i64 %add71, 47
  %90 = xor i64 %2, %shr.i183
  %xor1.i184 = xor i64 %90, %add71
  %mul.i185 = mul i64 %xor1.i184, 2654435761
  %indvars.iv.next238 = shl i64 %indvars.iv237, 3
  %mul68.1 = add i64 %indvars.iv.next238, 8
  %idxprom69.1 = and i64 %mul68.1, 4294967288
  %arrayidx70.1 = getelementptr i64, ptr %add.ptr5, i64 %idxprom69.1
  %91 = load i64, ptr %arrayidx70.1, align 8
  %add71.1 = add i64 %91, %mul.i185
  %shr.i183.1 = lshr i64 %add71.1, 47
  %92 = xor i64 %2, %shr.i183.1
  %xor1.i184.1 = xor i64 %92, %add71.1
  %mul.i185.1 = mul i64 %xor1.i184.1, 2654435761
  %indvars.iv.next238.1 = add i64 %indvars.iv237, 2
  %exitcond.not.1 = icmp eq i64 %indvars.iv.next238.1, %0
  br i1 %exitcond.not.1, label %for.end75, label %for.body67

for.end75:
  %total.4.lcssa = phi i64 [ %total.3, %if.end ], [ %mul.i185.lcssa.unr, %for.body67.prol.loopexit ], [ %mul.i185.1, %for.body67 ]
  %mul78 = mul i64 %div77175, %conv
  %gep = getelementptr i64, ptr %invariant.gep, i64 %mul78
  br i1 %cmp96220, label %for.body98.lr.ph, label %for.end108

for.body98.lr.ph:
  %xor1.i188 = xor i32 %rem, 1
  %idxprom2.i = zext i32 %xor1.i188 to i64
  br label %for.body98

for.body98:
  %stripe.0222 = phi i64 [ %conv89, %for.body98.lr.ph ], [ %inc107, %for.body98 ]
  %total.5221 = phi i64 [ %total.4.lcssa, %for.body98.lr.ph ], [ %add105, %for.body98 ]
  %add.ptr100.idx = shl i64 %stripe.0222, 6
  %add.ptr100 = getelementptr i8, ptr %gep, i64 %add.ptr100.idx
  %stripe.0.tr = trunc i64 %stripe.0222 to i32
  %conv103 = and i32 %stripe.0.tr, 15
  %arrayidx.i187 = getelementptr i64, ptr %add.ptr100, i64 %idx.ext
  %93 = load i64, ptr %arrayidx.i187, align 8
  %div11.i.i = add i32 %conv103, %rem
  %idxprom.i.i = zext i32 %div11.i.i to i64
  %arrayidx.i.i = getelementptr i64, ptr @SECRET, i64 %idxprom.i.i
  %94 = load i64, ptr %arrayidx.i.i, align 8
  %xor.i = xor i64 %94, %93
  %arrayidx3.i189 = getelementptr i64, ptr %add.ptr100, i64 %idxprom2.i
  %95 = load i64, ptr %arrayidx3.i189, align 8
  %and.i = and i64 %xor.i, 4294967295
  %shr.i190 = lshr i64 %xor.i, 32
  %mul4.i = mul i64 %and.i, %shr.i190
  %add5.i = add i64 %95, %total.5221
  %add105 = add i64 %add5.i, %mul4.i
  %inc107 = add i64 %stripe.0222, 1
  %cmp96 = icmp ult i64 %inc107, %sub.i
  br i1 %cmp96, label %for.body98, label %for.end108

for.end108:
  %total.5.lcssa = phi i64 [ %total.4.lcssa, %for.end75 ], [ %add105, %for.body98 ]
  %stripe.0.lcssa = phi i64 [ %conv89, %for.end75 ], [ %sub.i, %for.body98 ]
  br i1 %tobool.not.i, label %if.then110, label %if.end115

if.then110:
  %add.ptr112.idx = shl i64 %stripe.0.lcssa, 6
  %add.ptr112 = getelementptr i8, ptr %gep, i64 %add.ptr112.idx
  %arrayidx.i192 = getelementptr i64, ptr %add.ptr112, i64 %idx.ext
  %96 = load i64, ptr %arrayidx.i192, align 8
  %97 = getelementptr i64, ptr @SECRET, i64 %idx.ext
  %arrayidx.i.i195 = getelementptr i8, ptr %97, i64 120
  %98 = load i64, ptr %arrayidx.i.i195, align 8
  %arrayidx3.i.i197 = getelementptr i8, ptr %97, i64 128
  %99 = load i64, ptr %arrayidx3.i.i197, align 8
  %or.i.i = tail call i64 @llvm.fshl.i64(i64 %99, i64 %98, i64 56)
  %xor.i199 = xor i64 %or.i.i, %96
  %xor1.i200 = xor i32 %rem, 1
  %idxprom2.i201 = zext i32 %xor1.i200 to i64
  %arrayidx3.i202 = getelementptr i64, ptr %add.ptr112, i64 %idxprom2.i201
  %100 = load i64, ptr %arrayidx3.i202, align 8
  %and.i203 = and i64 %xor.i199, 4294967295
  %shr.i204 = lshr i64 %xor.i199, 32
  %mul4.i205 = mul i64 %and.i203, %shr.i204
  %add5.i206 = add i64 %100, %total.5.lcssa
  %add114 = add i64 %add5.i206, %mul4.i205
  br label %if.end115

if.end115:
  %total.6 = phi i64 [ %total.5.lcssa, %for.end108 ], [ %add114, %if.then110 ]
  %arrayidx117 = getelementptr i64, ptr %totals, i64 %indvars.iv240
  store i64 %total.6, ptr %arrayidx117, align 8
  %indvars.iv.next241 = add i64 %indvars.iv240, 1
  %exitcond244.not = icmp eq i64 %indvars.iv.next241, %wide.trip.count243
  br i1 %exitcond244.not, label %for.cond.cleanup, label %for.body
}

define void @merge_sums(ptr %totals, i32 %count, i64 %bytes, ptr %hashes) {
entry:
  %cmp56.not = icmp eq i32 %count, 0
  br i1 %cmp56.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %mul = mul i64 %bytes, -7046029288634856825
  %wide.trip.count = zext i32 %count to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next, %for.body ]
  %mul5 = shl i64 %indvars.iv, 3
  %idx.ext = and i64 %mul5, 4294967288
  %add.ptr = getelementptr i64, ptr %totals, i64 %idx.ext
  %0 = load i64, ptr %add.ptr, align 8
  %xor = xor i64 %0, 7914194659941938988
  %arrayidx10 = getelementptr i8, ptr %add.ptr, i64 8
  %1 = load i64, ptr %arrayidx10, align 8
  %xor15 = xor i64 %1, -6611157965513653271
  %conv = zext i64 %xor to i128
  %conv16 = zext i64 %xor15 to i128
  %mul17 = mul i128 %conv16, %conv
  %shr = lshr i128 %mul17, 64
  %xor2039 = xor i128 %shr, %mul17
  %xor20 = trunc i128 %xor2039 to i64
  %add21 = add i64 %mul, %xor20
  %add.ptr7.1 = getelementptr i8, ptr %add.ptr, i64 16
  %2 = load i64, ptr %add.ptr7.1, align 8
  %xor.1 = xor i64 %2, -1839215637059881052
  %arrayidx10.1 = getelementptr i8, ptr %add.ptr, i64 24
  %3 = load i64, ptr %arrayidx10.1, align 8
  %xor15.1 = xor i64 %3, -3433288310154277810
  %conv.1 = zext i64 %xor.1 to i128
  %conv16.1 = zext i64 %xor15.1 to i128
  %mul17.1 = mul i128 %conv16.1, %conv.1
  %shr.1 = lshr i128 %mul17.1, 64
  %xor2039.1 = xor i128 %shr.1, %mul17.1
  %xor20.1 = trunc i128 %xor2039.1 to i64
  %add21.1 = add i64 %add21, %xor20.1
  %add.ptr7.2 = getelementptr i8, ptr %add.ptr, i64 32
  %4 = load i64, ptr %add.ptr7.2, align 8
  %xor.2 = xor i64 %4, 5046485836271438973
  %arrayidx10.2 = getelementptr i8, ptr %add.ptr, i64 40
  %5 = load i64, ptr %arrayidx10.2, align 8
  %xor15.2 = xor i64 %5, -8055285457383852172
  %conv.2 = zext i64 %xor.2 to i128
  %conv16.2 = zext i64 %xor15.2 to i128
  %mul17.2 = mul i128 %conv16.2, %conv.2
  %shr.2 = lshr i128 %mul17.2, 64
  %xor2039.2 = xor i128 %shr.2, %mul17.2
  %xor20.2 = trunc i128 %xor2039.2 to i64
  %add21.2 = add i64 %add21.1, %xor20.2
  %add.ptr7.3 = getelementptr i8, ptr %add.ptr, i64 48
  %6 = load i64, ptr %add.ptr7.3, align 8
  %xor.3 = xor i64 %6, 5920048007935066598
  %arrayidx10.3 = getelementptr i8, ptr %add.ptr, i64 56
  %7 = load i64, ptr %arrayidx10.3, align 8
  %xor15.3 = xor i64 %7, 7336514198459093435
  %conv.3 = zext i64 %xor.3 to i128
  %conv16.3 = zext i64 %xor15.3 to i128
  %mul17.3 = mul i128 %conv16.3, %conv.3
  %shr.3 = lshr i128 %mul17.3, 64
  %xor2039.3 = xor i128 %shr.3, %mul17.3
  %xor20.3 = trunc i128 %xor2039.3 to i64
  %add21.3 = add i64 %add21.2, %xor20.3
  %shr.i = lshr i64 %add21.3, 37
  %xor.i = xor i64 %shr.i, %add21.3
  %mul.i = mul i64 %xor.i, 1609587791953885689
  %shr1.i = lshr i64 %mul.i, 32
  %xor2.i = xor i64 %shr1.i, %mul.i
  %arrayidx24 = getelementptr i64, ptr %hashes, i64 %indvars.iv
  store i64 %xor2.i, ptr %arrayidx24, align 8
  %indvars.iv.next = add i64 %indvars.iv, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next, %wide.trip.count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body
}

declare i64 @llvm.fshl.i64(i64, i64, i64)
