; clang 19, sha256 of the C f3e066a31cad8e2c
; scripts/compile_kernels.py has made this file.

%struct.row = type <{ [4 x i64], i32 }>

define void @find(ptr %table, ptr %rows, i64 %count, ptr %entries) {
entry:
  %cmp13 = icmp sgt i64 %count, 0
  br i1 %cmp13, label %for.body.lr.ph, label %for.cond.cleanup

for.body.lr.ph:
  %num_buckets.i = getelementptr i8, ptr %table, i64 40
  %first.i = getelementptr i8, ptr %table, i64 32
  %alive.i = getelementptr i8, ptr %table, i64 8
  %next.i = getelementptr i8, ptr %table, i64 16
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %i.014 = phi i64 [ 0, %for.body.lr.ph ], [ %inc, %entry_of.exit ]
  %arrayidx = getelementptr %struct.row, ptr %rows, i64 %i.014
  %last_word.i = getelementptr i8, ptr %arrayidx, i64 32
  %0 = load i32, ptr %last_word.i, align 1
  %conv.i = zext i32 %0 to i64
  %hash.09.i = mul i64 %conv.i, -7046029254386353131
  %arrayidx.i = getelementptr i8, ptr %arrayidx, i64 24
  %1 = load i64, ptr %arrayidx.i, align 1
  %or.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.09.i, i64 %hash.09.i, i64 29)
  %xor.i.i = xor i64 %or.i.i, %1
  %hash.0.i = mul i64 %xor.i.i, -7046029254386353131
  %arrayidx.1.i = getelementptr i8, ptr %arrayidx, i64 16
  %2 = load i64, ptr %arrayidx.1.i, align 1
  %or.i.1.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.i, i64 %hash.0.i, i64 29)
  %xor.i.1.i = xor i64 %or.i.1.i, %2
  %hash.0.1.i = mul i64 %xor.i.1.i, -7046029254386353131
  %arrayidx.2.i = getelementptr i8, ptr %arrayidx, i64 8
  %3 = load i64, ptr %arrayidx.2.i, align 1
  %or.i.2.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.1.i, i64 %hash.0.1.i, i64 29)
  %xor.i.2.i = xor i64 %or.i.2.i, %3
  %hash.0.2.i = mul i64 %xor.i.2.i, -7046029254386353131
  %4 = load i64, ptr %arrayidx, align 1
  %or.i.3.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.2.i, i64 %hash.0.2.i, i64 29)
  %xor.i.3.i = xor i64 %or.i.3.i, %4
  %hash.0.3.i = mul i64 %xor.i.3.i, -7046029254386353131
  %shr.i = lshr i64 %hash.0.3.i, 32
  %5 = load i64, ptr %num_buckets.i, align 8
  %mul.i = mul i64 %shr.i, %5
  %shr3.i = lshr i64 %mul.i, 32
  %6 = load ptr, ptr %first.i, align 8
  %arrayidx.i10 = getelementptr i32, ptr %6, i64 %shr3.i
  %entry1.017.i = load i32, ptr %arrayidx.i10, align 4
  %cmp18.i = icmp sgt i32 %entry1.017.i, -1
  br i1 %cmp18.i, label %land.rhs.lr.ph.i, label %entry_of.exit

land.rhs.lr.ph.i:
  %7 = load ptr, ptr %table, align 8
  br label %land.rhs.i

land.rhs.i:
  %entry1.019.i = phi i32 [ %entry1.017.i, %land.rhs.lr.ph.i ], [ %entry1.0.i, %while.body.i ]
  %idxprom.i = zext i32 %entry1.019.i to i64
  %arrayidx2.i = getelementptr %struct.row, ptr %7, i64 %idxprom.i
  %last_word.i.i = getelementptr i8, ptr %arrayidx2.i, i64 32
  %8 = load i32, ptr %last_word.i.i, align 1
  %xor.i.i11 = xor i32 %8, %0
  %conv.i.i = zext i32 %xor.i.i11 to i64
  %9 = load i64, ptr %arrayidx2.i, align 1
  %xor6.i.i = xor i64 %9, %4
  %or.i.i12 = or i64 %xor6.i.i, %conv.i.i
  %arrayidx.1.i.i = getelementptr i8, ptr %arrayidx2.i, i64 8
  %10 = load i64, ptr %arrayidx.1.i.i, align 1
  %xor6.1.i.i = xor i64 %10, %3
  %or.1.i.i = or i64 %or.i.i12, %xor6.1.i.i
  %arrayidx.2.i.i = getelementptr i8, ptr %arrayidx2.i, i64 16
  %11 = load i64, ptr %arrayidx.2.i.i, align 1
  %xor6.2.i.i = xor i64 %11, %2
  %or.2.i.i = or i64 %or.1.i.i, %xor6.2.i.i
  %arrayidx.3.i.i = getelementptr i8, ptr %arrayidx2.i, i64 24
  %12 = load i64, ptr %arrayidx.3.i.i, align 1
  %xor6.3.i.i = xor i64 %12, %1
  %or.3.i.i = or i64 %or.2.i.i, %xor6.3.i.i
  %cmp7.i.not.i = icmp eq i64 %or.3.i.i, 0
  br i1 %cmp7.i.not.i, label %land.rhs3.i, label %while.body.i

land.rhs3.i:
  %13 = load ptr, ptr %alive.i, align 8
  %arrayidx5.i = getelementptr i8, ptr %13, i64 %idxprom.i
  %14 = load i8, ptr %arrayidx5.i, align 1
  %tobool6.not.i = icmp eq i8 %14, 0
  br i1 %tobool6.not.i, label %while.body.i, label %entry_of.exit

while.body.i:
  %15 = load ptr, ptr %next.i, align 8
  %arrayidx9.i = getelementptr i32, ptr %15, i64 %idxprom.i
  %entry1.0.i = load i32, ptr %arrayidx9.i, align 4
  %cmp.i = icmp sgt i32 %entry1.0.i, -1
  br i1 %cmp.i, label %land.rhs.i, label %entry_of.exit

entry_of.exit:
  %entry1.0.lcssa.i = phi i32 [ %entry1.017.i, %for.body ], [ %entry1.019.i, %land.rhs3.i ], [ %entry1.0.i, %while.body.i ]
  %conv = sext i32 %entry1.0.lcssa.i to i64
  %arrayidx3 = getelementptr i64, ptr %entries, i64 %i.014
  store i64 %conv, ptr %arrayidx3, align 8
  %inc = add i64 %i.014, 1
  %exitcond.not = icmp eq i64 %inc, %count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body
}

define void @name(ptr %table, ptr %rows, i64 %count, ptr %entries) {
entry:
  %cmp5 = icmp sgt i64 %count, 0
  br i1 %cmp5, label %for.body.lr.ph, label %for.cond.cleanup

for.body.lr.ph:
  %num_buckets.i.i = getelementptr i8, ptr %table, i64 40
  %first.i.i = getelementptr i8, ptr %table, i64 32
  %alive.i.i = getelementptr i8, ptr %table, i64 8
  %next.i.i = getelementptr i8, ptr %table, i64 16
  %bucket4.i = getelementptr i8, ptr %table, i64 24
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %i.06 = phi i64 [ 0, %for.body.lr.ph ], [ %inc, %name_entry.exit ]
  %arrayidx = getelementptr %struct.row, ptr %rows, i64 %i.06
  %arrayidx1 = getelementptr i64, ptr %entries, i64 %i.06
  %0 = load i64, ptr %arrayidx1, align 8
  %conv = trunc i64 %0 to i32
  %last_word.i.i = getelementptr i8, ptr %arrayidx, i64 32
  %1 = load i32, ptr %last_word.i.i, align 1
  %conv.i.i = zext i32 %1 to i64
  %hash.09.i.i = mul i64 %conv.i.i, -7046029254386353131
  %arrayidx.i.i = getelementptr i8, ptr %arrayidx, i64 24
  %2 = load i64, ptr %arrayidx.i.i, align 1
  %or.i.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.09.i.i, i64 %hash.09.i.i, i64 29)
  %xor.i.i.i = xor i64 %or.i.i.i, %2
  %hash.0.i.i = mul i64 %xor.i.i.i, -7046029254386353131
  %arrayidx.1.i.i = getelementptr i8, ptr %arrayidx, i64 16
  %3 = load i64, ptr %arrayidx.1.i.i, align 1
  %or.i.1.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.i.i, i64 %hash.0.i.i, i64 29)
  %xor.i.1.i.i = xor i64 %or.i.1.i.i, %3
  %hash.0.1.i.i = mul i64 %xor.i.1.i.i, -7046029254386353131
  %arrayidx.2.i.i = getelementptr i8, ptr %arrayidx, i64 8
  %4 = load i64, ptr %arrayidx.2.i.i, align 1
  %or.i.2.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.1.i.i, i64 %hash.0.1.i.i, i64 29)
  %xor.i.2.i.i = xor i64 %or.i.2.i.i, %4
  %hash.0.2.i.i = mul i64 %xor.i.2.i.i, -7046029254386353131
  %5 = load i64, ptr %arrayidx, align 1
  %or.i.3.i.i = tail call i64 @llvm.fshl.i64(i64 %hash.0.2.i.i, i64 %hash.0.2.i.i, i64 29)
  %xor.i.3.i.i = xor i64 %or.i.3.i.i, %5
  %hash.0.3.i.i = mul i64 %xor.i.3.i.i, -7046029254386353131
  %shr.i.i = lshr i64 %hash.0.3.i.i, 32
  %6 = load i64, ptr %num_buckets.i.i, align 8
  %mul.i.i = mul i64 %shr.i.i, %6
  %shr3.i.i = lshr i64 %mul.i.i, 32
  %cmp.i = icmp ult i32 %1, 16777216
  br i1 %cmp.i, label %name_entry.exit, label %lor.lhs.false.i

lor.lhs.false.i:
  %7 = load ptr, ptr %first.i.i, align 8
  %arrayidx.i62.i = getelementptr i32, ptr %7, i64 %shr3.i.i
  %entry1.017.i.i = load i32, ptr %arrayidx.i62.i, align 4
  %cmp18.i.i = icmp sgt i32 %entry1.017.i.i, -1
  br i1 %cmp18.i.i, label %land.rhs.lr.ph.i.i, label %if.end.i

land.rhs.lr.ph.i.i:
  %8 = load ptr, ptr %table, align 8
  br label %land.rhs.i.i

land.rhs.i.i:
  %entry1.019.i.i = phi i32 [ %entry1.017.i.i, %land.rhs.lr.ph.i.i ], [ %entry1.0.i.i, %while.body.i.i ]
  %idxprom.i.i = zext i32 %entry1.019.i.i to i64
  %arrayidx2.i.i = getelementptr %struct.row, ptr %8, i64 %idxprom.i.i
  %last_word.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 32
  %9 = load i32, ptr %last_word.i.i.i, align 1
  %xor.i.i63.i = xor i32 %9, %1
  %conv.i.i.i = zext i32 %xor.i.i63.i to i64
  %10 = load i64, ptr %arrayidx2.i.i, align 1
  %xor6.i.i.i = xor i64 %10, %5
  %or.i.i64.i = or i64 %xor6.i.i.i, %conv.i.i.i
  %arrayidx.1.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 8
  %11 = load i64, ptr %arrayidx.1.i.i.i, align 1
  %xor6.1.i.i.i = xor i64 %11, %4
  %or.1.i.i.i = or i64 %or.i.i64.i, %xor6.1.i.i.i
  %arrayidx.2.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 16
  %12 = load i64, ptr %arrayidx.2.i.i.i, align 1
  %xor6.2.i.i.i = xor i64 %12, %3
  %or.2.i.i.i = or i64 %or.1.i.i.i, %xor6.2.i.i.i
  %arrayidx.3.i.i.i = getelementptr i8, ptr %arrayidx2.i.i, i64 24
  %13 = load i64, ptr %arrayidx.3.i.i.i, align 1
  %xor6.3.i.i.i = xor i64 %13, %2
  %or.3.i.i.i = or i64 %or.2.i.i.i, %xor6.3.i.i.i
  %cmp7.i.not.i.i = icmp eq i64 %or.3.i.i.i, 0
  br i1 %cmp7.i.not.i.i, label %land.rhs3.i.i, label %while.body.i.i

land.rhs3.i.i:
  %14 = load ptr, ptr %alive.i.i, align 8
  %arrayidx5.i.i = getelementptr i8, ptr %14, i64 %idxprom.i.i
  %15 = load i8, ptr %arrayidx5.i.i, align 1
  %tobool6.not.i.i = icmp eq i8 %15, 0
  br i1 %tobool6.not.i.i, label %while.body.i.i, label %name_entry.exit

while.body.i.i:
  %16 = load ptr, ptr %next.i.i, align 8
  %arrayidx9.i.i = getelementptr i32, ptr %16, i64 %idxprom.i.i
  %entry1.0.i.i = load i32, ptr %arrayidx9.i.i, align 4
  %cmp.i.i = icmp sgt i32 %entry1.0.i.i, -1
  br i1 %cmp.i.i, label %land.rhs.i.i, label %if.end.i

if.end.i:
  %17 = load ptr, ptr %bucket4.i, align 8
  %sext = shl i64 %0, 32
  %idxprom.i = ashr exact i64 %sext, 32
  %arrayidx.i = getelementptr i32, ptr %17, i64 %idxprom.i
  %18 = load i32, ptr %arrayidx.i, align 4
  %cmp5.i = icmp sgt i32 %18, -1
  br i1 %cmp5.i, label %if.then6.i, label %if.end18.i

if.then6.i:
  %idxprom10.i = zext i32 %18 to i64
  %arrayidx11.i = getelementptr i32, ptr %7, i64 %idxprom10.i
  %19 = load i32, ptr %arrayidx11.i, align 4
  %cmp12.not67.i = icmp eq i32 %19, %conv
  %.pre.i = load ptr, ptr %next.i.i, align 8
  br i1 %cmp12.not67.i, label %while.end.i, label %while.body.i

while.body.i:
  %20 = phi i32 [ %21, %while.body.i ], [ %19, %if.then6.i ]
  %idxprom13.i = sext i32 %20 to i64
  %arrayidx14.i = getelementptr i32, ptr %.pre.i, i64 %idxprom13.i
  %21 = load i32, ptr %arrayidx14.i, align 4
  %cmp12.not.i = icmp eq i32 %21, %conv
  br i1 %cmp12.not.i, label %while.end.i.loopexit, label %while.body.i

while.end.i.loopexit:
  %arrayidx14.i.le = getelementptr i32, ptr %.pre.i, i64 %idxprom13.i
  br label %while.end.i

while.end.i:
  %link.0.lcssa.i = phi ptr [ %arrayidx11.i, %if.then6.i ], [ %arrayidx14.i.le, %while.end.i.loopexit ]
  %arrayidx17.i = getelementptr i32, ptr %.pre.i, i64 %idxprom.i
  %22 = load i32, ptr %arrayidx17.i, align 4
  store i32 %22, ptr %link.0.lcssa.i, align 4
  br label %if.end18.i

if.end18.i:
  %23 = load ptr, ptr %table, align 8
  %arrayidx20.i = getelementptr %struct.row, ptr %23, i64 %idxprom.i
  tail call void @llvm.memcpy.p0.p0.i64(ptr align 1 %arrayidx20.i, ptr align 1 %arrayidx, i64 36, i1 false)
  %24 = load ptr, ptr %alive.i.i, align 8
  %arrayidx22.i = getelementptr i8, ptr %24, i64 %idxprom.i
  store i8 1, ptr %arrayidx22.i, align 1
  %conv.i = trunc i64 %shr3.i.i to i32
  %25 = load ptr, ptr %bucket4.i, align 8
  %arrayidx25.i = getelementptr i32, ptr %25, i64 %idxprom.i
  store i32 %conv.i, ptr %arrayidx25.i, align 4
  %26 = load ptr, ptr %first.i.i, align 8
  %arrayidx27.i = getelementptr i32, ptr %26, i64 %shr3.i.i
  %27 = load i32, ptr %arrayidx27.i, align 4
  %28 = load ptr, ptr %next.i.i, align 8
  %arrayidx30.i = getelementptr i32, ptr %28, i64 %idxprom.i
  store i32 %27, ptr %arrayidx30.i, align 4
  %29 = load ptr, ptr %first.i.i, align 8
  %arrayidx32.i = getelementptr i32, ptr %29, i64 %shr3.i.i
  store i32 %conv, ptr %arrayidx32.i, align 4
  br label %name_entry.exit

name_entry.exit:
  %inc = add i64 %i.06, 1
  %exitcond.not = icmp eq i64 %inc, %count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

declare i64 @llvm.fshl.i64(i64, i64, i64)
